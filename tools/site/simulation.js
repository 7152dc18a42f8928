// The event simulation of cluster/planning/simulate.py, for the playground; with chunks, which Python's does not know.
// tests/test_tool_site_scripts.py holds it equal to the Python functions. It needs schedules.js.
"use strict";

/** Handles events in the order of their time and, at the same time, of their entry. */
class EventQueue {
  constructor() {
    this.events = []; // sorted, and never many: a few for each stage
    this.now = 0;
  }

  at(time, handle) {
    const place = this.events.findLastIndex((event) => event.time <= time) + 1;
    this.events.splice(place, 0, { time, handle });
  }

  run() {
    while (this.events.length) {
      const { time, handle } = this.events.shift();
      this.now = time;
      handle();
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
    this.flows = new Map(); // one at a time from a rank to another: seconds of it that are left, and their rate
    this.leaving = new Map(); // messages that wait for those before them
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
    const way = `${message.source} ${message.destination}`;
    if (!this.leaving.has(way)) this.leaving.set(way, []);
    this.leaving.get(way).push(message);
    this.useLinks(message);
  }

  /** Starts the next message on the way of this one, if there is none on it, and shares out its uplink and downlink. */
  useLinks({ source, destination }) {
    const way = `${source} ${destination}`,
      start = this.queue.now;
    if (!this.flows.has(way) && this.leaving.get(way).length)
      this.flows.set(way, { message: this.leaving.get(way).shift(), left: this.transfer, start, since: start, rate: 0 });
    for (const flow of this.withLinksOf(source, destination)) {
      const { source: a, destination: b } = flow.message,
        others = this.withLinksOf(a, b),
        users = Math.max(
          others.filter(({ message }) => message.source === a).length,
          others.filter(({ message }) => message.destination === b).length,
        ),
        rate = 1 / users;
      if (rate === flow.rate) continue;
      const next = { ...flow, left: flow.left - flow.rate * (start - flow.since), since: start, rate };
      this.flows.set(`${a} ${b}`, next);
      this.queue.at(start + next.left / rate, () => this.messageLeft(next));
    }
  }

  /** The messages under way that use the uplink of rank a or the downlink of rank b. */
  withLinksOf(a, b) {
    const rank = (other) => (other + this.p) % this.p;
    const ways = [`${a} ${rank(a - 1)}`, `${a} ${rank(a + 1)}`, `${rank(b - 1)} ${b}`, `${rank(b + 1)} ${b}`];
    return [...new Set(ways)].filter((way) => this.flows.has(way)).map((way) => this.flows.get(way));
  }

  messageLeft(flow) {
    const { source, destination, kind, microbatch } = flow.message,
      way = `${source} ${destination}`,
      now = this.queue.now;
    if (this.flows.get(way) !== flow) return; // it has become slower or faster since
    this.flows.delete(way);
    this.ends[source] = Math.max(this.ends[source], now);
    this.outstanding[source]--;
    this.transfers.push({ source, destination, kind, microbatch, start: flow.start, end: now + this.latency });
    this.queue.at(now + this.latency, () => this.arrives(flow.message));
    this.useLinks(flow.message);
    if (this.isWaiting[source]) this.resume(source);
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

if (typeof module !== "undefined") {
  Object.assign(globalThis, require("./schedules"));
  module.exports = { SCHEDULES, simulate };
}
