// A figure of bars over time: rows of bars that can be zoomed, moved, pointed at and reached by keyboard.
"use strict";

const ROW = 26,
  THIN = 7,
  GAP = 24,
  AXIS = 24; // heights

const svgElement = (name, ...rest) => fill(document.createElementNS("http://www.w3.org/2000/svg", name), ...rest);
const htmlElement = (name, ...rest) => fill(document.createElement(name), ...rest);

function fill(element, attributes, parent, text) {
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

/** Round numbers between two others. */
function roundTicks(first, last, about) {
  const rough = (last - first) / Math.max(about, 1) || 1,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= rough * (1 - 1e-9));
  const ticks = [];
  for (let k = Math.ceil(first / step - 1e-9); k * step <= last * (1 + 1e-9); k++)
    ticks.push(Number((k * step).toPrecision(12)));
  return ticks;
}

class BarFigure {
  /** `label`: what the figure is, for those who can't see it. */
  constructor(place, label) {
    this.bars = [];
    this.frame = htmlElement("div", { class: "figure", "data-keys": "" }, place);
    const tools = htmlElement("div", { class: "tools" }, this.frame);
    for (const [text, name, act] of [
      ["+", "Zoom in", () => this.zoom(0.5)],
      ["−", "Zoom out", () => this.zoom(2)],
      ["←", "Move to the left", () => this.move(-0.25)],
      ["→", "Move to the right", () => this.move(0.25)],
      ["All", "Show all", () => this.setView(0, this.length)],
    ]) {
      htmlElement("button", { type: "button", "aria-label": name, title: name }, tools, text).addEventListener(
        "click",
        act,
      );
    }
    this.svg = svgElement("svg", { role: "group", "aria-label": label }, this.frame);
    this.told = htmlElement("p", { class: "told", "aria-live": "polite" }, this.frame);
    this.legend = htmlElement("ul", { class: "legend" }, this.frame);
    this.listen();
    new ResizeObserver(() => this.layout()).observe(this.frame);
  }

  /**
   * Shows these bars. `rows`: {name, tracks}, the first track is thick; bars: {row, track, start, end, kind (a class),
   * label, text (what is told of it)}; `legend`: [class, text] pairs.
   */
  show(rows, bars, length, legend) {
    Object.assign(this, { rows, length, first: 0, last: length, chosen: null, tabStop: null });
    this.svg.replaceChildren();
    this.axis = svgElement("g", {}, this.svg);
    let y = 0;
    this.places = rows.map(({ name, tracks }) => {
      const text = svgElement("text", { x: 0, y: y + 15 }, this.svg, name),
        top = y + GAP - 3;
      const ground = svgElement("rect", { class: "idle", x: 0, y: top, height: ROW }, this.svg);
      y = top + ROW + (tracks - 1) * THIN + 2;
      return { text, ground, top };
    });
    this.height = y;
    this.bars = bars.map((bar) => this.addBar(bar));
    this.legend.replaceChildren();
    for (const [name, text] of legend) {
      const item = htmlElement("li", {}, this.legend);
      svgElement(
        "rect",
        { class: name, width: 14, height: 14, rx: 2 },
        svgElement("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, item),
      );
      item.append(text);
    }
    this.told.textContent = "Point at a bar, or press Tab to reach the bars.";
    this.layout();
  }

  addBar(bar) {
    const top = this.places[bar.row].top + (bar.track ? ROW + (bar.track - 1) * THIN + 1 : 0);
    const height = bar.track ? THIN - 1 : ROW;
    const rect = svgElement(
      "rect",
      {
        class: `bar ${bar.kind}`,
        y: top,
        height,
        rx: bar.track ? 1 : 2,
        tabindex: "-1",
        role: "img",
        "aria-label": bar.text,
      },
      this.svg,
    );
    const label =
      bar.track || bar.label === ""
        ? null
        : svgElement("text", { class: "label", y: top + 17, "aria-hidden": "true" }, this.svg, bar.label);
    const added = { ...bar, rect, textElement: label, labelWidth: 7.5 * String(bar.label).length + 3 };
    rect.addEventListener("pointerenter", () => this.tell(added));
    rect.addEventListener("focus", () => this.choose(added));
    return added;
  }

  tell(bar) {
    this.told.textContent = bar.text;
  }

  /** Makes a bar the one that the keyboard is at, and brings it into view. */
  choose(bar) {
    if (this.chosen) this.chosen.rect.classList.remove("chosen");
    bar.rect.classList.add("chosen");
    this.chosen = bar;
    this.setTabStop(bar);
    this.tell(bar);
    if (bar.end < this.first || bar.start > this.last) {
      const span = this.last - this.first,
        middle = (bar.start + bar.end) / 2;
      this.setView(middle - span / 2, middle + span / 2);
    }
  }

  /** The one bar that the tab key reaches. */
  setTabStop(bar) {
    if (this.tabStop) this.tabStop.rect.setAttribute("tabindex", "-1");
    bar.rect.setAttribute("tabindex", "0");
    this.tabStop = bar;
  }

  setView(first, last) {
    const span = Math.min(last - first, this.length);
    this.first = Math.max(0, Math.min(first, this.length - span));
    this.last = this.first + span;
    this.layout();
  }

  /** `factor` < 1 shows a shorter time; `at`: the time that keeps its place. */
  zoom(factor, at = (this.first + this.last) / 2) {
    const span = Math.max((this.last - this.first) * factor, this.length / 500);
    const share = (at - this.first) / (this.last - this.first);
    this.setView(at - share * span, at + (1 - share) * span);
  }

  move(share) {
    const by = share * (this.last - this.first);
    this.setView(this.first + by, this.last + by);
  }

  /** Puts everything in its place for the present width and view. */
  layout() {
    const width = this.svg.clientWidth;
    if (!width || !this.rows) return;
    const x = (time) => ((time - this.first) / (this.last - this.first)) * width;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height + AXIS}`);
    this.svg.setAttribute("height", this.height + AXIS);
    for (const { ground } of this.places) ground.setAttribute("width", width);
    for (const bar of this.bars) {
      const left = Math.max(x(bar.start), -10),
        right = Math.min(x(bar.end), width + 10),
        size = right - left;
      const isSeen = right > 0 && left < width;
      bar.rect.style.display = isSeen ? "" : "none";
      bar.rect.setAttribute("x", left);
      bar.rect.setAttribute("width", isSeen ? Math.max(size - (size > 3 ? 1 : 0), 0.7) : 0);
      if (!bar.textElement) continue;
      bar.textElement.style.display = isSeen && size > bar.labelWidth ? "" : "none";
      bar.textElement.setAttribute("x", (left + right) / 2);
    }
    const isSeen = (bar) => bar.end > this.first && bar.start < this.last;
    if (this.bars.length && !(this.tabStop && isSeen(this.tabStop)))
      this.setTabStop(this.bars.find(isSeen) || this.bars[0]);
    this.axis.replaceChildren();
    for (const time of roundTicks(this.first, this.last, width / 90)) {
      svgElement("line", { x1: x(time), x2: x(time), y1: 0, y2: this.height + 4 }, this.axis);
      const isLast = x(time) > width - 40;
      svgElement(
        "text",
        {
          class: "axis",
          x: Math.min(x(time) + (isLast ? -3 : 0), width),
          y: this.height + 18,
          "text-anchor": isLast ? "end" : x(time) < 15 ? "start" : "middle",
        },
        this.axis,
        String(time),
      );
    }
  }

  listen() {
    const timeAt = (event) => {
      const box = this.svg.getBoundingClientRect();
      return this.first + ((event.clientX - box.left) / box.width) * (this.last - this.first);
    };
    this.svg.addEventListener(
      "wheel",
      (event) => {
        const isOut = event.deltaY > 0;
        if (!event.deltaY || (isOut && this.last - this.first >= this.length * (1 - 1e-9))) return; // the page scrolls
        event.preventDefault();
        this.zoom(isOut ? 1.25 : 0.8, timeAt(event));
      },
      { passive: false },
    );
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
  }

  /** Left and right: the bar before and after on the same track. Up and down: the bar of the next row at that time. */
  onKey(event) {
    const keys = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.setView(0, this.length),
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      ArrowUp: () => this.change(-1),
      ArrowDown: () => this.change(1),
    };
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  }

  step(by) {
    const row = this.bars.filter((bar) => bar.row === this.chosen.row && bar.track === this.chosen.track);
    this.reach(row[row.indexOf(this.chosen) + by]);
  }

  change(by) {
    const tracks = [...new Set(this.bars.map((bar) => bar.row * 100 + bar.track))].sort((a, b) => a - b);
    const wanted = tracks[tracks.indexOf(this.chosen.row * 100 + this.chosen.track) + by];
    const track = this.bars.filter((bar) => bar.row * 100 + bar.track === wanted);
    const distance = (bar) => Math.abs(bar.start - this.chosen.start);
    this.reach(track.sort((a, b) => distance(a) - distance(b))[0]);
  }

  reach(bar) {
    if (!bar) return;
    this.choose(bar);
    bar.rect.focus({ preventScroll: true });
  }
}
