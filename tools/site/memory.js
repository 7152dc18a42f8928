// The planner's memory model: tools/data_sheets.py (what a module holds), machines.py (what a stage holds) and
// peak_memory in simulate.py, for the page that splits a model. tests/test_tool_site_scripts.py holds them equal.
"use strict";

const NUMBER_BYTES = { float32: 4, bfloat16: 2 };

// The tiny Llama of this tutorial; TinyLlama (Zhang et al. 2024); Llama 2 (Touvron et al. 2023); Llama 3.1 (Meta 2024)
const MODELS = {
  tiny: { hidden: 128, width: 352, layers: 8, heads: 8, kvHeads: 4, vocab: 1024, tied: false, headDim: 16 },
  "1.1B": { hidden: 2048, width: 5632, layers: 22, heads: 32, kvHeads: 4, vocab: 32000, tied: false, headDim: 64 },
  "7B": { hidden: 4096, width: 11008, layers: 32, heads: 32, kvHeads: 32, vocab: 32000, tied: false, headDim: 128 },
  "8B": { hidden: 4096, width: 14336, layers: 32, heads: 32, kvHeads: 8, vocab: 128256, tied: false, headDim: 128 },
  "70B": { hidden: 8192, width: 28672, layers: 80, heads: 64, kvHeads: 8, vocab: 128256, tied: false, headDim: 128 },
};

function layerWeights({ hidden, width, heads, kvHeads, headDim }) {
  return 2 * hidden * headDim * (heads + kvHeads) + 3 * hidden * width;
}

/** Parameters of the whole model. */
function totalParameters(shape) {
  const ends = (shape.tied ? 1 : 2) * shape.hidden * shape.vocab + shape.hidden;
  return shape.layers * (layerWeights(shape) + 2 * shape.hidden) + ends;
}

/** Parameters that a stage holds on one of its `tp` devices. The tied matrix counts on the first and the last stage. */
function stageParameters(shape, tp, layers, isFirst, isLast) {
  const table = Math.floor((shape.hidden * shape.vocab) / tp);
  const layer = Math.floor(layerWeights(shape) / tp + 2 * shape.hidden);
  const ends = shape.tied ? (isFirst || isLast ? table : 0) : (isFirst ? table : 0) + (isLast ? table : 0);
  return layers * layer + ends + (isLast ? shape.hidden : 0);
}

/**
 * Bytes at most of one device of a stage, by what they hold. `job`: shape, tp, seqLen, size (samples of a micro-batch),
 * dtype, recompute. `stage`: layers, isFirst, isLast, live (micro-batches whose activations it holds).
 */
function stageMemory(job, stage) {
  const { shape, tp, seqLen, size, dtype, recompute } = job,
    { layers, isFirst, isLast, live } = stage;
  const bytes = NUMBER_BYTES[dtype],
    hiddenBytes = seqLen * shape.hidden * bytes;
  const split = 2 * shape.headDim * (shape.heads + shape.kvHeads) + shape.heads + 4 * shape.width;
  const layerBytes = seqLen * (2 * (3 * shape.hidden + 1) + split / tp) * bytes;
  const logits = seqLen * (3 * shape.hidden * bytes + (12 * shape.vocab) / tp);
  let saved = live * (layers * (recompute ? hiddenBytes : layerBytes) + (isLast ? logits : 0));
  if (recompute) saved += Math.max(0, layerBytes - hiddenBytes - (isLast ? logits : 0)); // one layer at a time
  const parameters = stageParameters(shape, tp, layers, isFirst, isLast);
  const parts = {
    weights: 4 * parameters,
    "copy in bfloat16": bytes < 4 ? bytes * parameters : 0,
    gradients: 4 * parameters,
    AdamW: 8 * parameters,
    activations: size * saved,
    messages: isFirst && isLast ? 0 : 4 * size * hiddenBytes, // two posted receives, two sends under way
  };
  return { parts, total: Object.values(parts).reduce((sum, part) => sum + part, 0) };
}

/** The stages of a pipeline: layers and live micro-batches of each. */
function stagesOf(layers, schedule, numMicrobatches, schedules) {
  const p = layers.length;
  return layers.map((count, s) => ({
    layers: count,
    isFirst: s === 0,
    isLast: s === p - 1,
    live: schedules.liveMicrobatches(schedules.SCHEDULES[schedule](s, p, numMicrobatches)),
  }));
}

/** Layers of each stage, dealt one by one to the stage whose device would then be the least full. */
function dealLayers(job, memory, schedule, numMicrobatches, schedules) {
  const p = memory.length,
    layers = Array(p).fill(1),
    stages = stagesOf(layers, schedule, numMicrobatches, schedules);
  const fullness = (s, count) => stageMemory(job, { ...stages[s], layers: count }).total / memory[s];
  for (let dealt = p; dealt < job.shape.layers; dealt++) {
    let best = 0;
    for (let s = 1; s < p; s++) {
      if (fullness(s, layers[s] + 1) < fullness(best, layers[best] + 1)) best = s;
    }
    layers[best]++;
  }
  return layers;
}

/**
 * Every dp x pp x tp of the devices. `devices`: bytes of each, in order; tp ranks are neighbours, then stages, then
 * pipelines. `job` as above without tp, and with schedule and globalBatch. Each grid: dp, pp, tp, microbatches, and its
 * pipelines' stages with layers, live, device bytes and memory; `fits`, if no device is more than `fraction` full.
 */
function splits(job, devices, fraction, schedules) {
  const grids = [],
    { shape, globalBatch, size } = job,
    n = devices.length;
  for (let tp = 1; tp <= n; tp++) {
    if ([n, shape.heads, shape.kvHeads, shape.width].some((count) => count % tp)) continue;
    for (let pp = 1; pp <= Math.min(n / tp, shape.layers); pp++) {
      const dp = n / tp / pp,
        microbatches = globalBatch / dp / size;
      if (n % (tp * pp) || !Number.isInteger(microbatches)) continue;
      const pipelines = [];
      for (let k = 0; k < dp; k++) {
        const memory = Array.from({ length: pp }, (_, s) => {
          const first = (k * pp + s) * tp;
          return Math.min(...devices.slice(first, first + tp));
        });
        const tpJob = { ...job, tp },
          layers = dealLayers(tpJob, memory, job.schedule, microbatches, schedules);
        pipelines.push(
          stagesOf(layers, job.schedule, microbatches, schedules).map((stage, s) => ({
            ...stage,
            device: memory[s],
            ...stageMemory(tpJob, stage),
          })),
        );
      }
      const fullness = Math.max(...pipelines.flat().map((stage) => stage.total / stage.device));
      grids.push({ dp, pp, tp, microbatches, pipelines, fullness, fits: fullness <= fraction });
    }
  }
  return grids;
}

if (typeof module !== "undefined") {
  module.exports = {
    MODELS,
    NUMBER_BYTES,
    totalParameters,
    stageParameters,
    stageMemory,
    stagesOf,
    dealLayers,
    splits,
  };
}
