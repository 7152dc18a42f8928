// A figure of rows of bars over time. What is too wide scrolls; a bar says what it is when it is pointed at.
"use strict";

function htmlElement(name, attributes, parent, text) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

/**
 * Shows bars in `place`. `rows`: their names; bars: {row, start, end, kind (a class), label, text (what is told of it)};
 * `legend`: [class, text] pairs.
 */
function showBars(place, rows, bars, length, legend) {
  place.replaceChildren();
  const shortest = Math.min(...bars.map(({ start, end }) => end - start || length)),
    width = Math.min((18 * length) / shortest, 8000),
    chart = htmlElement("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "The schedule" }, place);
  const lanes = rows.map((name) => {
    htmlElement("p", { class: "lane-name" }, chart, name);
    return htmlElement("div", { class: "lane idle", style: `min-width: ${width}px` }, chart);
  });
  for (const { row, start, end, kind, label, text } of bars) {
    const [left, wide] = [start, end - start].map((time) => `${(100 * time) / length}%`);
    htmlElement("span", { class: `bar ${kind}`, style: `left: ${left}; width: ${wide}`, title: text }, lanes[row], label);
  }
  const axis = htmlElement("p", { class: "axis" }, chart);
  for (const time of [0, length]) htmlElement("span", {}, axis, String(Number(time.toPrecision(4))));
  const names = htmlElement("p", { class: "legend" }, place);
  for (const [kind, text] of legend) htmlElement("span", { class: `sample ${kind}` }, names).after(` ${text} `);
}
