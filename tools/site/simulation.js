// play() of lab/watch/schedule.py, to which a test holds it equal, on machines of unlike speed.
"use strict";

/**
 * Each stage does its actions one after the other, as soon as what they need is there. `actions`: by stage, [kind,
 * microbatch, chunk] of each. A stage whose actions have no W computes both gradients in B. `costs`: {F, B, W} of all
 * chunks of a stage together, at speed 1; `message`: the time from the end of a pass to its result's arrival at another
 * stage.
 */
function play(actions, costs, message, speeds) {
  const p = actions.length,
    v = 1 + Math.max(...actions.flat().map(([, , chunk]) => chunk)),
    todo = actions.map((stage) => [...stage]),
    divided = actions.map((stage) => stage.some(([kind]) => kind === "W")),
    done = new Map(), // what was computed -> when
    ends = Array(p).fill(0),
    spans = [];
  let messages = 0;
  /** When the action can begin, undefined where what it needs is not there. */
  const ready = (stage, [kind, i, chunk]) => {
    const virtual = chunk * p + stage,
      neighbour = virtual + (kind === "F" ? -1 : 1),
      times = [ends[stage]];
    if (kind !== "F") times.push(done.get(`${kind === "B" ? "F" : "B"} ${virtual} ${i}`));
    if (kind !== "W" && neighbour >= 0 && neighbour < p * v)
      times.push(done.get(`${kind} ${neighbour} ${i}`) + (neighbour % p !== stage && message));
    const latest = Math.max(...times.map((time) => time ?? NaN));
    return Number.isNaN(latest) ? undefined : latest;
  };
  for (let moved = true; moved; ) {
    moved = false;
    todo.forEach((stage, s) => {
      for (let start; stage.length && (start = ready(s, stage[0])) !== undefined; moved = true) {
        const [kind, microbatch, chunk] = stage.shift(),
          cost = costs[kind] + (kind === "B" && !divided[s] ? costs.W : 0);
        ends[s] = start + cost / v / speeds[s];
        done.set(`${kind} ${chunk * p + s} ${microbatch}`, ends[s]);
        spans.push({ stage: s, kind, microbatch, chunk, start, end: ends[s] });
        const isLast = kind === "F" ? chunk * p + s === p * v - 1 : chunk * p + s === 0;
        messages += kind !== "W" && !isLast && p > 1;
      }
    });
  }
  const makespan = Math.max(...ends),
    busy = spans.reduce((sum, { start, end }) => sum + end - start, 0);
  return { spans, makespan, messages, v, bubble: makespan ? 1 - busy / (p * makespan) : 0, live: actions.map(peak) };
}

/** The most chunks whose activations a stage holds: until their W, or until their B where it has no W. */
function peak(actions) {
  const last = actions.some(([kind]) => kind === "W") ? "W" : "B";
  let live = 0;
  return Math.max(...actions.map(([kind]) => (live += (kind === "F") - (kind === last))));
}

if (typeof module !== "undefined") module.exports = { play };
