// The schedules of step 9's pipeline_parallel.py, and the event simulation of cluster/planning/simulate.py,
// for the playground. tests/test_tool_site_scripts.py holds both equal to the Python functions.
//
// An action is [kind, microbatch]: F forward, B gradient of the input, W gradients of the weights. A stage that has no
// W computes both gradients in B, so its B takes the time of B and W.
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

/** ZB-H1: 1F1B, each W `stage` micro-batches after its B, and on stage 0 in its B. */
function zeroBubble(stage, numStages, numMicrobatches) {
  const actions = [];
  for (const [kind, i] of oneFOneB(stage, numStages, numMicrobatches)) {
    actions.push([kind, i]);
    if (kind === "B" && stage > 0 && i >= stage) actions.push(["W", i - stage]);
  }
  for (let i = Math.max(numMicrobatches - stage, 0); i < numMicrobatches; i++) actions.push(["W", i]);
  return actions;
}

const SCHEDULES = {
  afab,
  "1f1b": oneFOneB,
  zb: zeroBubble,
  "1f1b-2": (s, p, m) => oneFOneB(s, p, m, 2),
  "1f1b-3": (s, p, m) => oneFOneB(s, p, m, 3),
  "1f1b-4": (s, p, m) => oneFOneB(s, p, m, 4),
};

/** Micro-batches at most whose activations a stage holds: until its W, or until its B where it has no W. */
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
  /** `options`: p, m, schedule, costs {F, B, W}, transfer and latency of a message, speeds of the p machines. */
  constructor(options) {
    const { p, m, schedule, costs, transfer = 0, latency = 0, speeds } = options;
    Object.assign(this, { p, transfer, latency });
    this.actions = Array.from({ length: p }, (_, s) => SCHEDULES[schedule](s, p, m));
    this.durations = this.actions.map((actions, s) => {
      const isDivided = actions.some(([kind]) => kind === "W"),
        speed = speeds ? speeds[s] : 1;
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
      const [kind, microbatch] = actions[k],
        source = this.neighbour(s, kind, -1);
      while (source !== null && !this.arrived.has(this.message(source, s, actions[k]).key)) yield null;
      const start = this.queue.now;
      yield this.durations[s][kind];
      this.spans.push({ stage: s, kind, microbatch, start, end: this.queue.now });
      this.ends[s] = this.queue.now;
      this.send(s, actions[k]);
      while (this.outstanding[s] > 2 * this.p) yield null;
    }
  }

  /** The stage that an action of this kind sends to (step 1) or receives from (step -1); null: none. */
  neighbour(s, kind, step) {
    if (kind === "W") return null;
    const other = kind === "F" ? s + step : s - step;
    return other >= 0 && other < this.p ? other : null;
  }

  message(source, destination, [kind, microbatch]) {
    return { key: `${source} ${destination} ${kind}${microbatch}`, source, destination, kind, microbatch };
  }

  postReceive(s, action) {
    const source = this.neighbour(s, action[0], -1);
    if (source === null) return;
    const message = this.message(source, s, action);
    if (this.posted.has(message.key)) return;
    this.posted.set(message.key, this.queue.now);
    if (this.sent.has(message.key)) {
      // its sender has to learn of the receive
      this.queue.at(this.queue.now + this.latency, () => this.mayLeave(message));
    }
  }

  send(s, action) {
    const destination = this.neighbour(s, action[0], 1);
    if (destination === null) return;
    const message = this.message(s, destination, action);
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
    for (const sender of [destination - 1, destination + 1]) {
      if (sender >= 0 && sender < this.p) this.useUplink(sender);
    }
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

if (typeof module !== "undefined") module.exports = { SCHEDULES, liveMicrobatches, simulate };
