// A figure of rows of bars over time. What is too wide scrolls; a bar says what it is, pointed at or reached by keyboard.
"use strict";

const ROW = 26,
  GAP = 24,
  AXIS = 24, // heights
  NARROWEST = 16; // width of a bar

const svgElement = (name, ...rest) => fill(document.createElementNS("http://www.w3.org/2000/svg", name), ...rest);
const htmlElement = (name, ...rest) => fill(document.createElement(name), ...rest);

function fill(element, attributes, parent, text) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

/** About `count` round numbers from 0 to `last`. */
function roundTicks(last, count) {
  const rough = last / count || 1,
    power = 10 ** Math.floor(Math.log10(rough)),
    step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough * (1 - 1e-9));
  return Array.from({ length: Math.floor((last / step) * (1 + 1e-9)) + 1 }, (_, k) => Number((k * step).toPrecision(12)));
}

class BarFigure {
  /** `label`: what the figure is, for those who can't see it. */
  constructor(place, label) {
    const frame = htmlElement("div", { class: "figure" }, place);
    this.box = htmlElement("div", { class: "scroll", role: "region", "aria-label": label }, frame);
    this.told = htmlElement("p", { class: "told", "aria-live": "polite" }, frame);
    this.legend = htmlElement("ul", { class: "legend" }, frame);
  }

  /**
   * Shows these bars. `rows`: their names; bars: {row, start, end, kind (a class), label, text (what is told of it)};
   * `legend`: [class, text] pairs.
   */
  show(rows, bars, length, legend) {
    const shortest = Math.min(...bars.map(({ start, end }) => end - start || length)),
      width = Math.min((NARROWEST * length) / shortest, 8000),
      height = rows.length * (GAP + ROW);
    const percent = (time) => `${(100 * time) / length}%`;
    const svg = svgElement("svg", { role: "group", height: height + AXIS, style: `min-width: ${width}px` });
    svg.addEventListener("keydown", (event) => this.onKey(event));
    for (const time of roundTicks(length, Math.max(width, 600) / 90)) {
      const anchor = time === 0 ? "start" : time > 0.97 * length ? "end" : "middle";
      svgElement("line", { x1: percent(time), x2: percent(time), y1: 0, y2: height + 4 }, svg);
      const place = { class: "axis", x: percent(time), y: height + 18, "text-anchor": anchor };
      svgElement("text", place, svg, String(time));
    }
    rows.forEach((name, row) => {
      const y = row * (GAP + ROW);
      svgElement("text", { x: 0, y: y + 15 }, svg, name);
      svgElement("rect", { class: "idle", x: 0, y: y + GAP - 3, width: "100%", height: ROW }, svg);
    });
    this.bars = bars.map((bar, k) => {
      const { row, start, end, kind, label, text } = bar,
        y = row * (GAP + ROW) + GAP - 3;
      const place = { x: percent(start), y, width: percent(end - start), height: ROW, rx: 2 };
      const rect = svgElement("rect", { class: `bar ${kind}`, ...place, role: "img", "aria-label": text }, svg);
      rect.setAttribute("tabindex", k ? -1 : 0); // the tab key reaches one bar, the arrow keys the others
      for (const event of ["pointerenter", "focus"]) rect.addEventListener(event, () => (this.told.textContent = text));
      const size = ((end - start) / length) * Math.max(width, 600);
      const middle = { class: "label", x: percent((start + end) / 2), y: y + 17, "aria-hidden": "true" };
      if (size > 7 * String(label).length) svgElement("text", middle, svg, label);
      return { ...bar, rect };
    });
    this.box.replaceChildren(svg);
    this.box.tabIndex = 0; // it may scroll, and site.js has seen it empty
    this.legend.replaceChildren();
    for (const [name, text] of legend) {
      const item = htmlElement("li", {}, this.legend),
        sample = svgElement("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, item);
      svgElement("rect", { class: name, width: 14, height: 14, rx: 2 }, sample);
      item.append(text);
    }
    this.told.textContent = "Point at a bar, or press Tab to reach the bars.";
  }

  /** Left and right: the bar before and after in the row. Up and down: the bar of the next row at that time. */
  onKey(event) {
    const chosen = this.bars.find(({ rect }) => rect === event.target),
      [along, across] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] || [];
    if (!chosen || along === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    const row = this.bars.filter((bar) => bar.row === chosen.row + across);
    const distance = (bar) => Math.abs(bar.start - chosen.start);
    const next = along ? row[row.indexOf(chosen) + along] : row.sort((a, b) => distance(a) - distance(b))[0];
    if (!next) return;
    chosen.rect.setAttribute("tabindex", -1);
    next.rect.setAttribute("tabindex", 0);
    next.rect.focus();
  }
}
