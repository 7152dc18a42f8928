// How to split a model over ranks: what tools/choose.py and splits.py compute, with their names, and the page that asks
// and shows it.
// tests/test_tool_choose.py holds the numbers equal.
"use strict";

const ENGINES = ["1f1b", "zb", "interleaved", "interleaved_zb"],
  AXES = ["dp", "tp", "cp", "pp", "ep"];
const range = (length) => Array.from({ length }, (_, k) => k);
const sum = (parts) => Object.values(parts).reduce((total, part) => total + part, 0);
const chunks = (job, { engine }) => (engine.startsWith("interleaved") ? job.virtual_stages : 1);
const numberBytes = ({ dtype }) => (dtype === "bfloat16" ? 2 : 4);

function* splits(job) {
  const upTo = (n) => range(n).map((k) => k + 1),
    divisors = upTo(job.ranks).filter((k) => job.ranks % k === 0);
  const dividing = (n) => divisors.filter((k) => n % k === 0);
  for (const tp of divisors)
    for (const pp of dividing(job.ranks / tp))
      for (const cp of dividing(job.ranks / tp / pp)) {
        const dp = job.ranks / tp / pp / cp,
          sp = tp > 1 && Math.floor(job.seq_len / cp) % tp === 0;
        for (const engine of pp > 1 ? ENGINES : ["-"])
          for (const ep of upTo(job.experts || 1).filter((k) => dp % k === 0 && job.experts % k === 0))
            for (const zero of range(dp * cp > 1 ? 4 : 1)) yield { dp, tp, pp, engine, zero, cp, ep, sp };
      }
}

/** Ranks over which ZeRO divides a parameter, and over which one of an expert. */
function shards(job, { dp, cp, ep, zero }) {
  const gcd = (a, b) => (b ? gcd(b, a % b) : a),
    size = (zero && job.shard_size) || dp * cp;
  return [size, gcd(Math.max(Math.floor(size / ep), 1), (dp * cp) / ep)];
}

/** Whether the steps do not train like this, or nobody would; refusal() in Python says why. */
function isRefused(job, split) {
  const { dp, tp, pp, cp, zero } = split,
    [size] = shards(job, split),
    m = job.global_batch / dp / job.micro_batch;
  const isCut = [job.heads, job.kv_heads, job.width].every((size) => size % tp === 0);
  const isWhole = m % 1 === 0 && !(cp > 1 && job.seq_len % (2 * cp * tp)) && (dp * cp) % size === 0;
  return !isCut || !isWhole || (zero && job.shard_size === 1) || pp * chunks(job, split) > job.layers || m < pp;
}

function alive({ pp, engine }, rank, m, v) {
  if (pp === 1) return [1, 0];
  const firstRound = Math.ceil(m / Math.floor(m / pp));
  const most = (v - 1) * firstRound + (engine === "interleaved" ? 2 * (pp - rank) - 1 : pp - rank);
  const before = Math.min(most, v * m);
  return [before, engine.endsWith("zb") ? Math.min(rank, v * m - before) : 0];
}

function layersOf(job, split, rank) {
  const stages = split.pp * chunks(job, split);
  const of = (s) => Math.floor(job.layers / stages) + (s < job.layers % stages);
  return sum(range(chunks(job, split)).map((c) => of(c * split.pp + rank)));
}

/** Those of all layers of a rank; of its experts; and of the rest: embedding, final norm and projection. */
function parameters(job, split, rank) {
  const { hidden, width, heads, kv_heads, head_dim, vocab, experts } = job,
    mlp = (3 * hidden * width) / split.tp;
  const attention = (2 * hidden * head_dim * (heads + kv_heads)) / split.tp;
  const [first, last] = [rank === 0, rank === split.pp - 1],
    tables = job.tied ? first || last : first + last,
    count = layersOf(job, split, rank);
  return [
    count * (attention + 2 * hidden + (experts ? experts * hidden : mlp)),
    (count * experts * mlp) / split.ep,
    (tables * hidden * vocab) / split.tp + last * hidden,
  ];
}

const allParameters = (job) => sum(parameters(job, { tp: 1, pp: 1, ep: 1, engine: "-" }, 0));

function activations(job, split, rank, m) {
  const { tp, pp, cp, sp } = split,
    v = chunks(job, split),
    number = numberBytes(job),
    tokens = (job.micro_batch * job.seq_len) / cp;
  const hidden = tokens * number * job.hidden,
    isLast = rank === pp - 1;
  const attention = 2 * job.head_dim * (job.heads + job.kv_heads);
  const norm = tokens * (number * job.hidden + 4), // on a GPU: its input, and 1/rms in float32
    divided = (tokens * (number * (attention + 4 * job.width) + 4 * job.heads)) / tp,
    weights = 4 * hidden + (tokens * number * (attention + 3 * job.width)) / tp;
  let layer = 2 * (norm + hidden) + divided,
    head = isLast * (norm + hidden + (12 * tokens * job.vocab) / tp);
  if (job.experts) {
    const k = job.experts_per_token;
    layer += 2 * k * hidden + (tokens * number * 4 * (k - 1) * job.width) / tp;
  }
  if (sp) {
    layer -= 2 * (1 - 1 / tp) * norm;
    head -= isLast * (1 - 1 / tp) * norm;
  }
  const [forB, forW] = alive(split, rank, m, v),
    headW = isLast * (hidden + (tokens * number * job.vocab) / tp),
    between = hidden / (sp ? tp : 1),
    each = layersOf(job, split, rank) / v;
  const kept = forB * each * (job.recompute ? between : layer) + head + forW * (each * weights + headW);
  return kept + (job.recompute ? Math.max(0, layer - between - head) : 0) + (pp > 1 ? 4 * between : 0);
}

function held(job, split, rank, m) {
  const { tp, pp, zero } = split,
    [layers, experts, rest] = parameters(job, split, rank),
    [size, ofExpert] = shards(job, split),
    owned = layers + experts + rest,
    divided = (layers + rest) / size + experts / ofExpert;
  const table = (job.hidden * job.vocab) / tp,
    layer = (layers + experts) / layersOf(job, split, rank),
    number = numberBytes(job),
    copies = number < 4 ? number : 0;
  const lookedUp = rank === 0 && (pp > 1 || !job.tied) ? table : 0;
  let weights = 4 * owned + copies * (owned - lookedUp),
    gradients = 4 * (zero > 1 ? divided : owned);
  if (zero === 2) gradients += 4 * Math.max(table, (job.hidden * job.width) / tp);
  if (zero === 3) {
    const atOnce = Math.min(2, Math.ceil(job.layers / (pp * chunks(job, split)))),
      gathered = job.gather_once ? layers + experts : atOnce * layer;
    weights = 4 * divided + number * gathered + 4 * rest + (rank === pp - 1 ? copies * table : 0);
    gradients += 4 * gathered + 4 * rest;
  }
  const AdamW = 8 * (zero > 0 ? divided : owned);
  return { weights, gradients, AdamW, activations: activations(job, split, rank, m) };
}

function sentToCopies(job, split, rank) {
  const [layers, experts, rest] = parameters(job, split, rank),
    [size, ofExpert] = shards(job, split),
    n = split.dp * split.cp;
  return 8 * ((((n - size) / n) * (layers + rest)) / size + ((1 - (ofExpert * split.ep) / n) * experts) / ofExpert);
}

function sent(job, split, rank, m) {
  const { tp, pp, zero, cp, ep, sp } = split,
    [size, ofExpert] = shards(job, split),
    [first, last] = [rank === 0, rank === pp - 1];
  const tokens = (m * job.micro_batch * job.seq_len) / cp,
    number = numberBytes(job),
    hidden = tokens * job.hidden * number,
    rows = job.experts ? job.experts_per_token : 1,
    count = layersOf(job, split, rank);
  const again = job.recompute ? (sp ? 1.5 : 1) : 0,
    sums = (4 + again) * count + first + last,
    norms = sp ? 4 * (2 * count + last + count * job.experts) * job.hidden : 0,
    weights = job.experts ? count * tokens * rows * number : 0;
  const [layers, experts, rest] = parameters(job, split, rank),
    [scatters, gathers] = job.gather_once ? [1, 1] : [m, m * (2 - (pp === 1 ? 1 / count : 0))],
    times = 4 * [2, 2, m + 1, scatters][zero],
    gathered = zero === 3 ? number * gathers : 0,
    everywhere = times * (layers + rest) + gathered * layers + (zero === 3 ? 4 * rest : 0);
  const tied = job.tied && (first || last) ? (4 * job.vocab * job.hidden) / tp / (zero ? size : 1) : 0,
    keys = (2 * count * tokens * job.kv_heads * job.head_dim) / tp;
  return {
    dp:
      ((size - 1) / size) * everywhere +
      ((ofExpert - 1) / ofExpert) * (times + gathered) * experts +
      sentToCopies(job, split, rank),
    tp: ((2 * (tp - 1)) / tp) * (sums * hidden + last * 12 * tokens + norms + weights),
    cp: cp > 1 ? keys * ((job.recompute ? 3 : 2) * (cp - 1) * number + 4 * cp) : 0,
    pp: pp > 1 ? ((2 * chunks(job, split) - first - last) * hidden) / (sp ? tp : 1) + tied : 0,
    ep: (((job.recompute ? 6 : 4) * (ep - 1)) / ep) * count * rows * hidden,
  };
}

function price(job, split) {
  const { dp, tp, pp, cp, ep, engine } = split,
    m = job.global_batch / dp / job.micro_batch;
  const parts = range(pp).map((rank) => held(job, split, rank, m)),
    fullest = parts.reduce((a, b) => (sum(b) > sum(a) ? b : a));
  const volumes = range(pp).map((rank) => sent(job, split, rank, m));
  const volume = Object.fromEntries(AXES.map((axis) => [axis, Math.max(...volumes.map((each) => each[axis]))]));
  const bubble = (pp - 1) / ((engine.endsWith("zb") ? 3 : 1) * chunks(job, split) * m + pp - 1);
  const spans = { tp, cp: tp * cp, pp: tp * cp * pp, ep: tp * cp * pp * ep, dp: dp > 1 ? job.ranks : tp * cp };
  const toCopies = Math.max(...range(pp).map((rank) => sentToCopies(job, split, rank))),
    [size] = shards(job, split);
  if (size < dp * cp) spans.dp = size <= cp ? tp * size : tp * pp * size;
  const rate = (axis) => (job.per_machine % spans[axis] === 0 ? job.inside : job.between);
  const seconds = AXES.map((axis) => (volume[axis] - (axis === "dp" ? toCopies : 0)) / rate(axis));
  const active = allParameters({ ...job, experts: job.experts && job.experts_per_token }),
    passes = (6 * active * job.global_batch * job.seq_len) / job.ranks / job.flops;
  const lost = passes * ((job.recompute ? 4 / 3 : 1) / (1 - bubble) - 1) + sum(seconds) + toCopies / job.between;
  return { split, microbatches: m, held: fullest, memory: sum(fullest), sent: volume, bubble, lost };
}

/** [rows that fit, rows that do not, how many splits are refused] */
function choose(job) {
  const all = [...splits(job)],
    rows = all.filter((split) => !isRefused(job, split)).map((split) => price(job, split));
  return [
    rows.filter((row) => row.memory <= job.memory).sort((a, b) => a.lost - b.lost || a.memory - b.memory),
    rows.filter((row) => row.memory > job.memory).sort((a, b) => a.memory - b.memory),
    all.length - rows.length,
  ];
}

/** The page: reads the form, shows the splits. */
function showChoice() {
  const SIZES = ["hidden", "width", "layers", "heads", "kv_heads", "vocab", "tied"],
    UNITS = { memory: 1e9, inside: 1e9, between: 1e9, flops: 1e12 };
  const form = document.getElementById("choose"),
    fields = form.elements,
    place = (id) => document.getElementById(id);

  function read() {
    const job = numbersOf(form);
    for (const [name, unit] of Object.entries(UNITS)) job[name] *= unit;
    if (job.hidden % job.heads) throw new Error("Query heads: choose a number that divides the hidden size.");
    const chosen = { dtype: fields.dtype.value, tied: fields.tied.checked, recompute: fields.recompute.checked,
      gather_once: fields.gather_once.checked };
    return { ...job, ...chosen, head_dim: job.hidden / job.heads };
  }

  function fill(body, rows, job) {
    const gb = (bytes) => (bytes / 1e9).toFixed(bytes < 1e11 ? 1 : 0);
    body.replaceChildren();
    for (const { split, microbatches, held, memory, sent, bubble, lost } of rows) {
      const { engine, zero, sp } = split,
        sizes = AXES.map((axis) => (axis === "tp" && sp ? `${split.tp} s` : split[axis]));
      const name = engine.startsWith("interleaved") ? `${engine} ${job.virtual_stages}` : engine;
      const volumes = [memory, ...Object.values(held), ...Object.values(sent)].map(gb);
      const shares = [lost.toFixed(2), `${(100 * bubble).toFixed(1)} %`],
        row = htmlElement("tr", {}, body);
      for (const text of [...sizes, name, zero, microbatches, ...shares, ...volumes])
        htmlElement("td", {}, row, String(text));
    }
  }

  function show(job) {
    const [fitting, others, refused] = choose(job);
    const gb = (row) => `${(row.memory / 1e9).toFixed(1)} GB`,
      [best, least] = [fitting[0], [...fitting, ...others].sort((a, b) => a.memory - b.memory)[0]];
    const grid = ({ split }) =>
      ["dp", "tp", "pp", "cp"].map((axis) => `${axis} ${split[axis]}`).join(" x ") +
      (split.ep > 1 ? `, ep ${split.ep}` : "") +
      (split.zero ? `, ZeRO ${split.zero}` : "");
    const tokens = (job.global_batch * job.seq_len).toLocaleString("en");
    showFacts(place("facts"), [
      ["Parameters", `${(allParameters(job) / 1e9).toPrecision(3)} billion`, `${tokens} tokens a step`],
      ["Splits that fit", fitting.length, `${others.length} do not, ${refused} are not to be had`],
      ["Loses least time", best ? `${best.lost.toFixed(2)} s` : "none", best ? grid(best) : "take more ranks"],
      ["Holds least", least ? gb(least) : "none", least ? grid(least) : ""],
    ]);
    fill(place("fitting"), fitting.slice(0, 20), job);
  }

  followForm(form, (event) => {
    const [chosen] = fields.model.selectedOptions;
    if (event && event.target === fields.model && chosen.dataset.sizes)
      chosen.dataset.sizes.split(" ").forEach((size, k) => {
        const field = fields[SIZES[k]];
        if (field.type === "checkbox") field.checked = size === "True";
        else field.value = size;
      });
    else if (event && SIZES.includes(event.target.name)) fields.model.value = "other";
    show(read());
  });
}

if (typeof module !== "undefined") module.exports = { choose };
else showChoice();
