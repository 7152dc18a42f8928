// Uses the built site with headless Chromium and writes what it finds as JSON, for tests/test_tool_site.py.
//
//     node site_browser.mjs MODULES CHROMIUM SITE '{"pages": [...], "queries": [...]}'
//
// MODULES: a folder with node_modules of playwright-core and axe-core. It asserts nothing.

import { createRequire } from "node:module";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, executablePath, site, wanted] = process.argv.slice(2),
  { pages, queries } = JSON.parse(wanted);
const require = createRequire(join(modules, "x.js")),
  browser = await require("playwright-core").chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] }),
  axe = require("axe-core").source,
  page = await browser.newPage(),
  found = { errors: [], requests: [], overflow: [], axe: [], results: {}, playground: {}, choose: {} };
page.on("console", (message) => {
  if (["error", "warning"].includes(message.type())) found.errors.push(`${page.url()}: ${message.text()}`);
});
page.on("pageerror", (error) => found.errors.push(`${page.url()}: ${error.message}`));
page.on("request", (request) => {
  if (!/^(file|data):/.test(request.url())) found.requests.push(request.url());
});
const open = (name) => page.goto(pathToFileURL(join(site, name.split(/[?#]/)[0])).href + (name.match(/[?#].*/) || ""));

// Of the theme: captions of the navigation, the two sidebars; and boxes that scroll, which a browser's keyboard reaches.
const THEIRS = ["aria-required-attr", "landmark-unique", "scrollable-region-focusable", "empty-table-header"];

/** Each page wide and light, then on a phone, dark and with all folds open. */
async function visit(name) {
  for (const [width, colorScheme] of [[1280, "light"], [390, "dark"]]) {
    await page.setViewportSize({ width, height: 844 });
    await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
    await open(name);
    await page.evaluate(() => document.querySelectorAll("details").forEach((fold) => (fold.open = true)));
    const wide = await page.evaluate(() => document.documentElement.scrollWidth);
    if (wide > width) found.overflow.push(`${name}: ${wide} > ${width}`);
    await page.evaluate(axe);
    const rules = Object.fromEntries(THEIRS.map((rule) => [rule, { enabled: false }])),
      { violations } = await page.evaluate((rules) => axe.run({ preload: false, rules }), rules);
    found.axe.push(...violations.map(({ id, nodes }) => `${name} ${width} ${id}: ${nodes[0].html.slice(0, 200)}`));
  }
}

/** What a search lists, as addresses. */
async function search(query) {
  await open(`search.html?q=${encodeURIComponent(query)}`);
  await page.waitForFunction(() => /found|did not/.test(document.querySelector(".search-summary")?.innerText));
  const links = await page.locator("ul.search a").evaluateAll((all) => all.slice(0, 3).map((a) => a.getAttribute("href")));
  found.results[query] = links;
}

/** From the start page on a phone, by the button for the navigation, to a chapter. */
async function navigate() {
  await open("index.html");
  const chapter = page.locator(".sidebar-tree a", { hasText: "12 ZeRO 1 and 2" });
  await page.waitForTimeout(100);
  found.before = (await chapter.boundingBox()).x;
  await page.locator("label.nav-overlay-icon").first().click();
  await page.waitForTimeout(500);
  found.after = (await chapter.boundingBox()).x;
  await chapter.click();
  found.arrived = page.url().split("/").pop();
}

const texts = (selector) => page.locator(selector).allTextContents();
const facts = () => page.locator("#facts dd").evaluateAll((all) => all.map((dd) => dd.firstChild.textContent));
const problem = () => page.locator("#problem").textContent();

async function usePlayground() {
  await open("playground.html");
  const read = async () => ({ facts: await facts(), live: await texts("#stages td:nth-child(2)") });
  const bars = await page.locator("#picture .bar").count();
  found.playground.start = { ...(await read()), bars };
  await page.selectOption("[name=schedule]", "zb");
  found.playground.zb = await read();
  for (const [name, value] of [["p", "2"], ["message", "0.5"], ["speed1", "2"]]) await page.fill(`[name=${name}]`, value);
  found.playground.changed = await read();
  await page.reload();
  found.playground.reloaded = await read();
  await page.fill("[name=m]", "17");
  found.playground.wrong = await problem();
}

async function useChoice() {
  await open("choose.html");
  await page.selectOption("[name=model]", "llama-70b");
  await page.check("[name=recompute]");
  const read = async () => ({ facts: await facts(), best: await texts("#fitting tr:first-child td") });
  found.choose.changed = await read();
  await page.reload();
  found.choose.reloaded = await read();
  await page.fill("[name=heads]", "60");
  found.choose.wrong = await problem();
}

for (const name of pages) await visit(name);
await navigate();
for (const query of queries) await search(query);
await page.setViewportSize({ width: 1280, height: 900 });
await usePlayground();
await useChoice();
await browser.close();
process.stdout.write(JSON.stringify(found));
