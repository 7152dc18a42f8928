// How to split a model over ranks: what tools/choose.py and splits.py compute, with their names, and the page that asks
// and shows it.
// A test holds the numbers equal.
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

function layersOfChunks(job, split, rank) {
  const stages = split.pp * chunks(job, split);
  const of = (s) => Math.floor(job.layers / stages) + (s < job.layers % stages);
  return range(chunks(job, split)).map((c) => of(c * split.pp + rank));
}

const layersOf = (job, split, rank) => sum(layersOfChunks(job, split, rank));

/** Chunks that are alive at most for their B, the layers of these, and chunks that are alive for their W. */
function alive({ pp, engine }, rank, m, layers) {
  if (pp === 1) return [1, layers[0], 0];
  const v = layers.length,
    firstRound = Math.ceil(m / Math.floor(m / pp)),
    before = Math.min((v - 1) * firstRound + (engine === "interleaved" ? 2 * (pp - rank) - 1 : pp - rank), v * m);
  const forward = layers.flatMap((each) => Array(firstRound).fill(each)),
    started = [...forward, ...forward, ...forward],
    ended = [...forward].reverse(),
    last = Math.min(forward.length, v * m - before);
  const most = range(last + 1).map((i) => sum(started.slice(0, before + i)) - sum(ended.slice(0, i)));
  return [before, Math.max(...most), engine.endsWith("zb") ? Math.min(rank, v * m - before) : 0];
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

/** Bytes of one micro-batch on a rank. On a GPU a norm keeps its input, and 1/rms in float32. */
function sizesOf(job, split) {
  const { tp, cp, sp } = split,
    number = numberBytes(job),
    tokens = (job.micro_batch * job.seq_len) / cp,
    k = job.experts ? job.experts_per_token : 1,
    ofBlock = sp ? tp : 1,
    hidden = tokens * number * job.hidden;
  const norm = (tokens * (number * job.hidden + 4)) / ofBlock,
    wide = (tokens * k * number * job.width) / tp,
    heads = (tokens * number * 2 * job.head_dim * (job.heads + job.kv_heads)) / tp;
  let layer = 2 * norm + 2 * hidden + heads + (4 * tokens * job.heads) / tp + 4 * wide;
  if (job.experts) layer += 2 * k * hidden - (1 - 1 / ofBlock) * hidden;
  const forW = 4 * hidden + heads + 3 * wide,
    logits = (tokens * number * job.vocab) / tp;
  return { tokens, hidden, between: hidden / ofBlock, layer, forW, wide, heads, norm, logits };
}

const isDivided = ({ engine }, rank) => engine.endsWith("zb") && (rank > 0 || engine.startsWith("interleaved"));

function kept(job, split, rank, m) {
  const sizes = sizesOf(job, split),
    layers = layersOfChunks(job, split, rank),
    isLast = rank === split.pp - 1,
    sendsBack = rank > 0 || layers.length > 1;
  const [forB, ofLayers, forW] = alive(split, rank, m, layers);
  let found = ofLayers * (job.recompute ? sizes.between : sizes.layer);
  found += forW * ((sum(layers) / layers.length) * sizes.forW + isLast * (sizes.hidden + sizes.logits));
  if (split.pp > 1) found += sizes.between * (forB - isLast + 2 * sendsBack);
  return found + 2 * sizes.tokens * job.head_dim * numberBytes(job);
}

function stateOf(job, split, rank) {
  const { tp, pp, zero } = split,
    [layers, experts, rest] = parameters(job, split, rank),
    [size, ofExpert] = shards(job, split),
    ofChunks = layersOfChunks(job, split, rank),
    count = sum(ofChunks),
    number = numberBytes(job),
    copies = number < 4 ? number : 0;
  const table = (job.hidden * job.vocab) / tp,
    owned = layers + experts + rest,
    divided = (layers + rest) / size + experts / ofExpert,
    averages = 8 * (zero > 0 ? divided : owned);
  const lookedUp = rank === 0 && (pp > 1 || !job.tied) ? table : 0;
  let weights = 4 * owned + copies * (owned - lookedUp),
    gathered = 0;
  if (zero === 3) {
    gathered = number * (layers + experts) * (job.gather_once ? 1 : Math.min(2, Math.max(...ofChunks)) / count);
    weights = 4 * divided + gathered + 4 * rest + (rank === pp - 1 ? copies * table : 0);
  }
  if (zero < 2 || job.gather_once) return { weights, gradients: 4 * owned, averages, gathered: 0, filling: 0 };
  let underWay = rank === 0 ? table : (job.hidden * job.heads * job.head_dim) / tp,
    filling = copies ? 0 : (job.hidden * job.width) / tp;
  if (zero === 3) [underWay, filling] = [rank === 0 ? rest : layers / count, (experts || layers) / count];
  underWay *= 1 + 1 / size;
  if (zero === 3 && isDivided(split, rank)) [underWay, filling] = [layers + experts, 0];
  return { weights, gradients: 4 * (divided + underWay), averages, gathered, filling: 4 * filling };
}

/** Weights, gradients and what a backward needs besides what is kept, when this may be most. */
function moments(job, split, rank) {
  const { tp, pp, ep, zero, sp } = split,
    { tokens, hidden, between, layer, forW, wide, heads, norm } = sizesOf(job, split),
    { weights, gradients, gathered, filling } = stateOf(job, split, rank);
  const number = numberBytes(job),
    isZb = isDivided(split, rank),
    isLast = rank === pp - 1,
    ofChunks = layersOfChunks(job, split, rank),
    ofChunk = ofChunks[ofChunks.length - 1],
    [layers, experts] = parameters(job, split, rank),
    piled = number < 4 && zero < 3 && !isZb ? number : 0,
    weight = (piled * job.hidden * job.width) / tp,
    inLayer = (piled * (layers + experts)) / sum(ofChunks),
    aLayer = job.recompute ? between : layer;
  let mlp = Math.max(weight + wide + Math.max(sp * hidden, wide), 3 * weight + 2 * hidden - 3 * wide),
    attention = heads - 4 * wide - hidden + 3 * weight;
  if (job.experts) {
    mlp = sp * hidden + (3 * wide * ep) / job.experts;
    attention = between + heads - 4 * wide + (3 * weight * job.experts) / ep;
  }
  attention = Math.max(attention, 3 * hidden - layer + (isZb ? forW : hidden + inLayer));
  const begun = between + (job.recompute ? layer - between : 0) + Math.max(mlp, attention),
    later = (!isLast || ofChunks.length > 1) * between + (ofChunk - 1) * (inLayer - aLayer + isZb * forW);
  const found = [[weights, gradients + filling, begun + Math.max(0, later)]];
  const again = job.recompute ? layer - between : 0,
    results = between + again + sp * hidden + 3 * job.experts_per_token * hidden + Math.max(0, later);
  if (job.experts) found.push([weights, gradients, results]);
  if (isLast) {
    const freed = pp > 1 ? 1 : 1 - 1 / Math.min(2, ofChunk);
    found.push([weights - freed * gathered, gradients, norm + hidden + (12 * tokens * job.vocab) / tp]);
  }
  if (rank === 0) {
    const table = (4 * job.hidden * job.vocab) / tp + 4 * tokens * job.hidden,
      done = ofChunks[0] * (inLayer - aLayer + isZb * forW);
    found.push([weights - gathered, gradients + filling, between + table + done]);
  }
  return found;
}

function held(job, split, rank, m) {
  const [weights, gradients, besides] = moments(job, split, rank).reduce((a, b) => (sum(b) > sum(a) ? b : a));
  const { averages } = stateOf(job, split, rank);
  return { weights, gradients, AdamW: averages, activations: kept(job, split, rank, m) + besides };
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
