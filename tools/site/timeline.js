// The measured timelines of a step: see figure.js for the bars and tools/site/site_runs.py for the data.
"use strict";

(() => {
  const CLASSES = {
    forward: "forward",
    backward: "backward",
    "weight gradients": "weights",
    optimizer: "optimizer",
    receive: "transfer",
    "all-reduce": "all-reduce",
    wait: "wait",
  };
  const COMPUTED = ["forward", "backward", "weight gradients"];

  /** The share of the time from the first forward to the last backward in which these ranks do neither. */
  function bubble({ kinds, events }, ranks) {
    const computed = events.filter(([rank, , kind]) => ranks.includes(rank) && COMPUTED.includes(kinds[kind]));
    const start = Math.min(...computed.map((event) => event[4])),
      end = Math.max(...computed.map((event) => event[4] + event[5]));
    return 1 - computed.reduce((sum, event) => sum + event[5], 0) / ((end - start) * ranks.length);
  }

  /** The ranks of each pipeline, in order. */
  function pipelines(names) {
    const found = new Map();
    names.forEach((name, rank) => {
      const dp = name.match(/dp (\d+)/)[1];
      found.set(dp, [...(found.get(dp) || []), rank]);
    });
    return [...found.values()];
  }

  function describe(data, [rank, track, kind, microbatch, start, duration, peer]) {
    const name = data.kinds[kind],
      of = microbatch < 0 ? "" : `, micro-batch ${microbatch}`;
    const from = peer < 0 ? "" : ` from rank ${peer}`;
    return (
      `Rank ${rank}: ${name}${of}${from}, ${(duration / 1000).toFixed(2)} ms, ` +
      `starts at ${(start / 1000).toFixed(2)} ms` +
      (track ? " (in the background)" : "")
    );
  }

  function show(figure, summary, data) {
    const tracks = data.ranks.map(
      (_, rank) => 1 + Math.max(...data.events.filter((event) => event[0] === rank).map((event) => event[1])),
    );
    const bars = data.events.map((event) => ({
      row: event[0],
      track: event[1],
      start: event[4] / 1000,
      end: (event[4] + event[5]) / 1000,
      kind: CLASSES[data.kinds[event[2]]] || "other",
      label: event[3] < 0 || data.kinds[event[2]] === "wait" ? "" : event[3],
      text: describe(data, event),
    }));
    const seen = new Set(data.kinds);
    const legend = Object.entries(CLASSES)
      .filter(([kind]) => seen.has(kind))
      .map(([kind, name]) => [name, kind]);
    legend.push(...data.kinds.filter((kind) => !(kind in CLASSES)).map((kind) => ["other", kind]));
    figure.show(
      data.ranks.map((name, rank) => ({ name, tracks: tracks[rank] })),
      bars,
      Math.max(...bars.map((bar) => bar.end)),
      legend,
    );
    const percent = (ranks) => `${(100 * bubble(data, ranks)).toFixed(1)} %`;
    const found = pipelines(data.ranks).map(
      (ranks, k, all) =>
        `${all.length > 1 ? `pipeline ${k}` : "the pipeline"} ` +
        (ranks.length > 1 ? `has a measured bubble of ${percent(ranks)}` : `is one stage, idle for ${percent(ranks)}`),
    );
    summary.textContent = `From the first forward to the last backward, ${found.join(", and ")}.`;
  }

  const place = document.getElementById("timeline-view");
  const timelines = JSON.parse(document.getElementById("timeline-data").textContent),
    names = Object.keys(timelines);
  const head = names.length > 1 && htmlElement("div", { class: "tools" }, place);
  const summary = htmlElement("p", {}, place);
  const figure = new BarFigure(place, "Timeline of one optimizer step", "ms");
  if (head) {
    const label = htmlElement("label", {}, head, "Schedule ");
    const choice = htmlElement("select", {}, label);
    for (const name of names) htmlElement("option", { value: name }, choice, name);
    choice.addEventListener("change", () => show(figure, summary, timelines[choice.value]));
  }
  show(figure, summary, timelines[names[0]]);
})();
