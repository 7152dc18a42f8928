// Visits the built site with headless Chromium and writes what it finds as JSON, for tests/test_tool_site.py.
//
//     node site_browser.mjs MODULES CHROMIUM SITE PROFILE
//
// MODULES: a folder with node_modules of playwright-core and axe-core; PROFILE: an empty folder. It asserts nothing.

import { createRequire } from "node:module";
import { readdirSync } from "node:fs";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const [modules, executablePath, site, profile] = process.argv.slice(2);
const require = createRequire(join(modules, "x.js"));
const { chromium } = require("playwright-core");
const axe = require("axe-core").source;

const WIDE = { width: 1280, height: 900 },
  PHONE = { width: 360, height: 740 };
const ARGS = [
  "--no-sandbox",
  "--disable-gpu",
  "--disable-quic",
  "--no-first-run",
  "--disable-background-networking",
  "--disable-component-update",
  "--disable-sync",
];
const context = await chromium.launchPersistentContext(profile, {
  executablePath,
  headless: true,
  args: ARGS,
  viewport: WIDE,
});
const page = await context.newPage();
const found = {
  errors: [],
  requests: [],
  axe: [],
  overflow: [],
  playground: {},
  choose: {},
  tour: {},
};
page.on("console", (message) => {
  if (["error", "warning"].includes(message.type())) found.errors.push(`${page.url()}: ${message.text()}`);
});
page.on("pageerror", (error) => found.errors.push(`${page.url()}: ${error.message}`));
page.on("requestfailed", (request) => {
  if (request.failure().errorText === "net::ERR_ABORTED") return; // a picture that the page did not wait for
  found.errors.push(`${request.url()} was not loaded`);
});
page.on("request", (request) => {
  if (!/^(file|data):/.test(request.url())) found.requests.push(request.url());
});

const address = (name) =>
  pathToFileURL(join(site, name.split("#")[0])).href + (name.includes("#") ? `#${name.split("#")[1]}` : "");
const open = (name) => page.goto(address(name));
const at = () => page.url().split("/").pop();

/** What axe-core finds wrong. */
async function inspect(name, colorScheme) {
  await page.emulateMedia({ colorScheme, reducedMotion: "reduce" });
  await page.evaluate(axe);
  const violations = await page.evaluate(async () =>
    (await window.axe.run({ preload: false })).violations.map(({ id, nodes }) => ({
      id,
      html: nodes.slice(0, 3).map((node) => `${node.html.slice(0, 200)} ${(node.any[0] || {}).message || ""}`),
    })),
  );
  found.axe.push(
    ...violations.map((violation) => ({ page: name, colorScheme, width: page.viewportSize().width, ...violation })),
  );
}

/** Every page, wide and light; then on a phone, dark and with all folds open. */
async function visitAll(names, inspected) {
  for (const name of names) {
    await page.setViewportSize(WIDE);
    await open(name);
    if (inspected.has(name)) await inspect(name, "light");
    await page.setViewportSize(PHONE);
    await page.evaluate(() =>
      document.querySelectorAll("details").forEach((fold) => {
        fold.open = true;
      }),
    );
    await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
    const width = await page.evaluate(() => document.documentElement.scrollWidth);
    if (width > PHONE.width) found.overflow.push(`${name}: ${width}`);
    if (inspected.has(name)) await inspect(name, "dark");
  }
  await page.setViewportSize(WIDE);
}

async function usePlayground() {
  await open("playground.html");
  const read = async () => ({
    facts: await page.locator("#facts dd").evaluateAll((all) => all.map((dd) => dd.firstChild.textContent)),
    bars: await page.locator("#picture .bar").count(),
    live: await page.locator("#stages td:nth-child(2)").allTextContents(),
    problem: await page.locator("#problem").textContent(),
  });
  found.playground.start = await read();
  await page.selectOption("[name=schedule]", "zb");
  found.playground.zb = await read();
  await page.fill("[name=p]", "2");
  await page.fill("[name=message]", "0.5");
  await page.fill("[name=speed1]", "2");
  found.playground.changed = await read();
  found.playground.address = at();
  await page.reload();
  found.playground.reloaded = await read();
  await page.fill("[name=m]", "17");
  found.playground.wrong = await read();
}

async function useChoice() {
  await open("choose.html");
  const read = async () => ({
    facts: await page.locator("#facts dd").evaluateAll((all) => all.map((dd) => dd.firstChild.textContent)),
    best: await page.locator("#fitting tr").first().locator("td").allTextContents(),
    problem: await page.locator("#problem").textContent(),
  });
  await page.selectOption("[name=model]", "llama-70b");
  await page.check("[name=recompute]");
  found.choose.changed = await read();
  await page.reload();
  found.choose.reloaded = await read();
  await page.fill("[name=heads]", "60");
  found.choose.wrong = await read();
}

/** A tour: keys, a scene's own address, its lit lines in view, playing by itself; the captions of its film, if any. */
async function playTour(name) {
  const seen = () =>
    page.evaluate(() => {
      const shown = [...document.querySelectorAll(".scene")].filter((scene) => !scene.hidden);
      const box = shown[0].querySelector(".lit")?.getBoundingClientRect();
      const isLitInView = box ? box.top >= 0 && box.top < innerHeight : null;
      return { shown: shown.map((scene) => scene.id), hash: location.hash, isLitInView };
    });
  const steps = {};
  await open(name);
  steps.start = await seen();
  await page.keyboard.press("ArrowRight");
  await page.keyboard.press("ArrowRight");
  steps.right = await seen();
  await page.keyboard.press("ArrowLeft");
  steps.left = await seen();
  await open(`${name}#scene-5`);
  steps.addressed = await seen();
  await page.setViewportSize({ width: 390, height: 800 });
  await page.evaluate(() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done))));
  steps.phone = { ...(await seen()), width: await page.evaluate(() => document.documentElement.scrollWidth) };
  await page.setViewportSize(WIDE);
  await page.evaluate(() => document.querySelectorAll(".scene").forEach((scene) => (scene.dataset.seconds = 0.2)));
  await page.keyboard.press(" ");
  await page.waitForFunction(() => location.hash === "#scene-7", null, { timeout: 10000 }).catch(() => {});
  await page.keyboard.press(" ");
  steps.played = await seen();
  steps.captions = await page.evaluate(async () => {
    document.querySelectorAll("details").forEach((fold) => (fold.open = true));
    const track = document.querySelector("video track");
    if (!track) return null;
    for (let k = 0; k < 50 && !track.track.cues?.length; k++) await new Promise((done) => setTimeout(done, 100));
    return { mode: track.track.mode, count: track.track.cues?.length || 0 };
  });
  found.tour = steps;
}

const names = readdirSync(site)
  .filter((name) => name.endsWith(".html"))
  .sort();
const sources = names.filter((name) => name.startsWith("source-"));
const inspected = new Set([
  ...names.filter((name) => !sources.includes(name)),
  sources[0],
  sources[sources.length - 1],
]);
await visitAll(names, inspected);
await page.emulateMedia({ colorScheme: "light", reducedMotion: "reduce" });
await usePlayground();
await useChoice();
await playTour("tour-4.html");
await context.close();
process.stdout.write(JSON.stringify(found));
