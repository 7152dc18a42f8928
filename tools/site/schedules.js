// The schedules of the steps, ZB-V, and the event simulation of cluster/planning/simulate.py, for the playground.
// tests/test_tool_site_scripts.py holds them equal to the Python functions.
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

/** Handles events in the order of their time and, at the same time, of their entry. */
class EventQueue {
  constructor() {
    this.heap = [];
    this.count = 0;
    this.now = 0;
  }

  at(time, handle) {
    const heap = this.heap,
      event = { time, order: this.count++, handle };
    let k = heap.length;
    heap.push(event);
    for (let parent; k > 0 && EventQueue.isBefore(event, heap[(parent = (k - 1) >> 1)]); k = parent)
      heap[k] = heap[parent];
    heap[k] = event;
  }

  static isBefore(a, b) {
    return a.time < b.time || (a.time === b.time && a.order < b.order);
  }

  pop() {
    const heap = this.heap,
      first = heap[0],
      last = heap.pop();
    if (heap.length) {
      let k = 0;
      for (let child; (child = 2 * k + 1) < heap.length; k = child) {
        if (child + 1 < heap.length && EventQueue.isBefore(heap[child + 1], heap[child])) child++;
        if (!EventQueue.isBefore(heap[child], last)) break;
        heap[k] = heap[child];
      }
      heap[k] = last;
    }
    return first;
  }

  run() {
    while (this.heap.length) {
      const event = this.pop();
      this.now = event.time;
      event.handle();
    }
  }
}

/** One pipeline's micro-batches, as PipelineSimulation in Python: the names of its methods are the same. */
class PipelineSimulation {
  /** `options`: p, m, schedule, v chunks a rank, costs {F, B, W} of all its chunks together, transfer and latency of a
   * message, speeds of the p machines. */
  constructor(options) {
    const { p, m, schedule, costs, transfer = 0, latency = 0, speeds } = options,
      v = chunksOf(schedule, options.v);
    Object.assign(this, { p, v, transfer, latency, isV: schedule === "zbv" });
    this.actions = Array.from({ length: p }, (_, s) => SCHEDULES[schedule](s, p, m, v > 1 ? v : undefined));
    this.durations = this.actions.map((actions, s) => {
      const isDivided = actions.some(([kind]) => kind === "W"),
        speed = v * (speeds ? speeds[s] : 1);
      return { F: costs.F / speed, B: (isDivided ? costs.B : costs.B + costs.W) / speed, W: costs.W / speed };
    });
    this.queue = new EventQueue();
    this.stages = this.actions.map((_, s) => this.runStage(s));
    this.isWaiting = Array(p).fill(false);
    this.posted = new Map(); // message -> when its receive was
    this.sent = new Set(); // before its receive was posted
    this.arrived = new Set();
    this.outstanding = Array(p).fill(0);
    this.uplinkBusy = Array(p).fill(false);
    this.downlinkBusy = Array(p).fill(false);
    this.leaving = Array.from({ length: p }, () => []);
    this.spans = [];
    this.transfers = [];
    this.ends = Array(p).fill(0);
  }

  run() {
    for (let s = 0; s < this.p; s++) this.queue.at(0, () => this.resume(s));
    this.queue.run();
    if (this.isWaiting.some(Boolean)) throw new Error(`deadlock: the stages that wait are ${this.isWaiting}`);
    const makespan = Math.max(...this.ends);
    const busy = this.spans.reduce((sum, span) => sum + span.end - span.start, 0);
    return {
      spans: this.spans,
      transfers: this.transfers,
      ends: this.ends,
      makespan,
      bubble: makespan > 0 ? 1 - busy / (this.p * makespan) : 0,
      live: this.actions.map(liveMicrobatches),
    };
  }

  /** Lets a stage go on until it computes or waits. */
  resume(s) {
    const { value, done } = this.stages[s].next();
    this.isWaiting[s] = !done && value === null;
    if (!done && value !== null) this.queue.at(this.queue.now + value, () => this.resume(s));
  }

  *runStage(s) {
    const actions = this.actions[s];
    for (let k = 0; k < actions.length; k++) {
      for (const upcoming of actions.slice(k, k + 3)) this.postReceive(s, upcoming);
      const [kind, microbatch, chunk = 0] = actions[k],
        needed = this.message(s, actions[k], -1);
      while (needed && !this.arrived.has(needed.key)) yield null;
      const start = this.queue.now;
      yield this.durations[s][kind];
      this.spans.push({ stage: s, kind, microbatch, chunk, start, end: this.queue.now });
      this.ends[s] = this.queue.now;
      this.send(s, actions[k]);
      while (this.outstanding[s] > 2 * this.p * this.v) yield null;
    }
  }

  /** The message that an action of rank s sends (step 1) or needs (step -1), named by what needs it; null: none. */
  message(s, [kind, microbatch, chunk = 0], step) {
    const { p, v, isV } = this,
      hop = kind === "F" ? step : -step;
    const other = (isV && chunk ? 2 * p - 1 - s : chunk * p + s) + hop; // a virtual stage
    if (kind === "W" || other < 0 || other >= v * p) return null;
    const otherChunk = Math.floor(other / p),
      rank = isV && otherChunk ? 2 * p - 1 - other : other % p;
    const [source, destination, receiving] = step > 0 ? [s, rank, otherChunk] : [rank, s, chunk];
    return { key: `${destination} ${kind}${microbatch} ${receiving}`, source, destination, kind, microbatch };
  }

  postReceive(s, action) {
    const message = this.message(s, action, -1);
    if (!message || message.source === s) return;
    if (this.posted.has(message.key)) return;
    this.posted.set(message.key, this.queue.now);
    if (this.sent.has(message.key)) {
      // its sender has to learn of the receive
      this.queue.at(this.queue.now + this.latency, () => this.mayLeave(message));
    }
  }

  send(s, action) {
    const message = this.message(s, action, 1);
    if (!message) return;
    if (message.destination === s) {
      this.arrived.add(message.key); // at the bottom of the V
      return;
    }
    this.outstanding[s]++;
    if (this.posted.has(message.key)) {
      const heard = this.posted.get(message.key) + this.latency;
      this.queue.at(Math.max(this.queue.now, heard), () => this.mayLeave(message));
    } else {
      this.sent.add(message.key);
    }
  }

  mayLeave(message) {
    this.leaving[message.source].push(message);
    this.useUplink(message.source);
  }

  /** Starts the first message whose receiver can take it, if the uplink is free. */
  useUplink(source) {
    if (this.uplinkBusy[source]) return;
    const i = this.leaving[source].findIndex((message) => !this.downlinkBusy[message.destination]);
    if (i < 0) return;
    const [message] = this.leaving[source].splice(i, 1),
      { destination, kind, microbatch } = message;
    this.uplinkBusy[source] = this.downlinkBusy[destination] = true;
    const start = this.queue.now,
      end = start + this.transfer;
    this.transfers.push({ source, destination, kind, microbatch, start, end: end + this.latency });
    this.queue.at(end, () => this.messageLeft(message));
  }

  messageLeft(message) {
    const { source, destination } = message;
    this.uplinkBusy[source] = this.downlinkBusy[destination] = false;
    this.ends[source] = Math.max(this.ends[source], this.queue.now);
    this.outstanding[source]--;
    this.queue.at(this.queue.now + this.latency, () => this.arrives(message));
    if (this.isWaiting[source]) this.resume(source);
    for (const sender of [destination - 1, destination + 1]) this.useUplink((sender + this.p) % this.p);
  }

  arrives(message) {
    this.arrived.add(message.key);
    if (this.isWaiting[message.destination]) this.resume(message.destination);
  }
}

/** What the simulation of these options finds: spans, transfers, ends, makespan, bubble and live. */
function simulate(options) {
  return new PipelineSimulation(options).run();
}

if (typeof module !== "undefined") module.exports = { SCHEDULES, chunksOf, liveMicrobatches, simulate };
