// The schedules of the steps, and ZB-V, for the playground: tests/test_tool_site_scripts.py holds them equal to the
// Python functions.
//
// An action is [kind, microbatch, chunk]: F forward, B gradient of the input, W gradients of the weights. A stage that
// has no W computes both gradients in B, so its B takes the time of B and W. Schedules without chunks leave these out.
"use strict";

/** All forward, all backward. */
function afab(stage, numStages, numMicrobatches) {
  const actions = [];
  for (const kind of ["F", "B"]) {
    for (let i = 0; i < numMicrobatches; i++) actions.push([kind, i]);
  }
  return actions;
}

/** One forward, one backward: at most 1 + ahead * (p - stage - 1) micro-batches are alive. */
function oneFOneB(stage, numStages, numMicrobatches, ahead = 1) {
  const actions = [];
  const warmUp = Math.min(ahead * (numStages - stage - 1), numMicrobatches);
  for (let i = 0; i < warmUp; i++) actions.push(["F", i]);
  for (let i = warmUp; i < numMicrobatches; i++) actions.push(["F", i], ["B", i - warmUp]); // steady state
  for (let i = numMicrobatches - warmUp; i < numMicrobatches; i++) actions.push(["B", i]); // cool-down
  return actions;
}

/** Divides each backward: its W comes after as many further B as `delay` says. */
function postponeWeightGradients(actions, delay) {
  const waiting = [],
    divided = [];
  for (const action of actions) {
    divided.push(action);
    if (action[0] === "B") waiting.push(["W", ...action.slice(1)]);
    if (action[0] === "B" && waiting.length > delay) divided.push(waiting.shift());
  }
  return [...divided, ...waiting];
}

/** ZB-H1: 1F1B, each W `stage` micro-batches after its B, and on stage 0 in its B. */
function zeroBubble(stage, numStages, numMicrobatches) {
  const actions = oneFOneB(stage, numStages, numMicrobatches);
  return stage > 0 ? postponeWeightGradients(actions, stage) : actions;
}

/** The forwards or backwards of a rank in their order, one list a round of about p micro-batches. */
function rounds(kind, p, m, v) {
  const count = Math.max(Math.floor(m / p), 1),
    lists = [];
  for (let k = 0, i = 0; k < count; k++) {
    const size = Math.floor(m / count) + (k < m % count),
      list = [];
    for (let c = 0; c < v; c++)
      for (let j = i; j < i + size; j++) list.push([kind, j, kind === "F" ? c : v - 1 - c]);
    lists.push(list);
    i += size;
  }
  return lists;
}

/** 1F1B over the rank's v chunks. A stage's warm-up is longer than the next one's by `hops` forwards. */
function interleave(stage, p, m, v, hops) {
  const [first] = rounds("F", p, m, v),
    backwards = rounds("B", p, m, v).flat();
  const warmUp = (first.length / v) * (v - 1) + hops * (p - 1 - stage);
  const actions = rounds("F", p, m, v).flat(),
    last = actions.splice(warmUp);
  last.forEach((forward, k) => actions.push(forward, backwards[k]));
  return [...actions, ...backwards.slice(last.length)];
}

const interleaved = (stage, p, m, v = 2) => interleave(stage, p, m, v, 2);

const interleavedZeroBubble = (stage, p, m, v = 2) =>
  postponeWeightGradients(interleave(stage, p, m, v, 1), stage);

/**
 * ZB-V (Qi et al. 2023): rank r holds the virtual stages r and 2p - 1 - r, so the last one is on rank 0. The order is
 * that of 2p - 1 or more micro-batches; of fewer, the actions of those that there are.
 */
function zeroBubbleV(rank, p, m) {
  const actions = [],
    count = {},
    n = Math.max(m, 2 * p - 1);
  const repeat = (times, names) => {
    for (let k = 0; k < times; k++) {
      for (const name of names.split(" ")) {
        const i = (count[name] = (count[name] ?? -1) + 1);
        if (i < m) actions.push([name[0], i, Number(name[1])]);
      }
    }
  };
  repeat(2 * (p - rank) - 1, "F0"); // until the first micro-batch is back in chunk 1
  repeat(rank, "F1 F0");
  repeat(p - rank, "F1 B1 W1"); // until its gradient is back in chunk 0
  repeat(n - p, "F0 B0 W0 F1 B1 W1");
  repeat(rank, "B0 B1"); // cool-down: others wait for B
  repeat(p - rank, "B0 W0");
  repeat(rank, "W1");
  repeat(rank, "W0");
  return actions;
}

const SCHEDULES = {
  afab,
  "1f1b": oneFOneB,
  zb: zeroBubble,
  interleaved,
  interleaved_zb: interleavedZeroBubble,
  zbv: zeroBubbleV,
  "1f1b-2": (s, p, m) => oneFOneB(s, p, m, 2),
  "1f1b-3": (s, p, m) => oneFOneB(s, p, m, 3),
  "1f1b-4": (s, p, m) => oneFOneB(s, p, m, 4),
};

/** The number of chunks a rank: 1 where the schedule has none. */
const chunksOf = (schedule, v = 2) => (schedule === "zbv" ? 2 : schedule.startsWith("interleaved") ? v : 1);

/** Micro-batches at most whose activations a stage holds, each of its chunks counted separately: until their W, or
 * until their B where it has no W. */
function liveMicrobatches(actions) {
  const last = actions.some(([kind]) => kind === "W") ? "W" : "B";
  let live = 0,
    most = 0;
  for (const [kind] of actions) {
    live += (kind === "F") - (kind === last);
    most = Math.max(most, live);
  }
  return most;
}

if (typeof module !== "undefined") module.exports = { SCHEDULES, chunksOf, liveMicrobatches };
