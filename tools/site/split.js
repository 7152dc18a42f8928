// The page that splits a model: reads the form, tries every grid, draws the chosen one. See memory.js and schedules.js.
"use strict";

(() => {
  const form = document.getElementById("split"),
    fields = form.elements;
  const [problem, answer, table, picture] = ["problem", "answer", "grids", "picture"].map((id) =>
    document.getElementById(id),
  );
  const GB = 1e9,
    MOST_DEVICES = 64;
  const PARTS = {
    weights: "forward",
    "copy in bfloat16": "all-reduce",
    gradients: "backward",
    AdamW: "optimizer",
    activations: "weights",
    messages: "transfer",
  };
  const SHAPE = Object.keys(MODELS.tiny);
  let chosen = null; // "dp pp tp" of the grid that is drawn

  const gigabytes = (bytes) => `${(bytes / GB).toPrecision(3)} GB`;

  /** Bytes of each device of a text such as 8x80 or 24,16,8. Throws an Error that says how to write it. */
  function readDevices(text) {
    const devices = [];
    for (const word of text.split(/[,+;\s]+/).filter(Boolean)) {
      const match = /^(?:(\d+)x)?(\d+(?:\.\d+)?)$/.exec(word);
      if (!match || !Number(match[2]))
        throw new Error(`Devices: write GB of each, as in 8x80 or 24,16,8, and not ${word}.`);
      if (Number(match[1] || 1) > MOST_DEVICES) throw new Error(`Devices: ${MOST_DEVICES} at most.`);
      devices.push(...Array(Number(match[1] || 1)).fill(Number(match[2]) * GB));
    }
    if (!devices.length || devices.length > MOST_DEVICES) throw new Error(`Devices: 1 to ${MOST_DEVICES} of them.`);
    return devices;
  }

  function readNumber(name) {
    const field = fields[name],
      value = field.valueAsNumber;
    if (!Number.isInteger(value) || !field.checkValidity()) {
      throw new Error(
        `${field.parentElement.firstChild.textContent.trim()}: choose a whole number ` +
          `from ${field.min} to ${field.max}.`,
      );
    }
    return value;
  }

  function readJob() {
    const shape = {};
    for (const name of SHAPE) shape[name] = name === "tied" ? fields.tied.checked : readNumber(name);
    return {
      shape,
      seqLen: readNumber("seqLen"),
      size: readNumber("size"),
      globalBatch: readNumber("globalBatch"),
      dtype: fields.dtype.value,
      schedule: fields.schedule.value,
      recompute: fields.recompute.checked,
    };
  }

  function fillPreset() {
    const shape = MODELS[fields.preset.value];
    if (!shape) return;
    for (const name of SHAPE) {
      if (name === "tied") fields.tied.checked = shape.tied;
      else fields[name].value = shape[name];
    }
  }

  const nameOf = ({ dp, pp, tp }) => `${dp} ${pp} ${tp}`;

  function showTable(grids) {
    table.replaceChildren(
      ...grids.map((grid) => {
        const { dp, pp, tp, microbatches, fullness, fits } = grid,
          row = htmlElement("tr", {}),
          name = nameOf(grid);
        const fullest = grid.pipelines.flat().reduce((a, b) => (b.total / b.device > a.total / a.device ? b : a));
        const radio = htmlElement(
          "input",
          { type: "radio", name: "grid", value: name, "aria-label": `show dp ${dp} pp ${pp} tp ${tp}` },
          htmlElement("td", {}, row),
        );
        radio.checked = name === chosen;
        row.classList.toggle("chosen", radio.checked);
        for (const size of [dp, pp, tp]) htmlElement("td", {}, row, String(size));
        htmlElement("td", { class: fits ? "fits" : "no-fit" }, row, fits ? "yes" : "no");
        const use = `${gigabytes(fullest.total)} of ${gigabytes(fullest.device)} (${Math.round(100 * fullness)} %)`;
        for (const text of [use, microbatches]) htmlElement("td", {}, row, String(text));
        return row;
      }),
    );
  }

  /** A bar for each stage of each pipeline: what lies on one of its devices, and where that device ends. */
  function showPicture(grid, fraction) {
    picture.replaceChildren();
    const frame = htmlElement("div", { class: "figure" }, picture),
      width = 800,
      row = 46;
    const stages = grid.pipelines.flatMap((pipeline, k) => pipeline.map((stage, s) => ({ ...stage, k, s })));
    const seen = stages
      .filter(({ k }) => k === 0 || stages.some((stage) => stage.device !== stages[0].device))
      .slice(0, 64);
    const most = Math.max(...seen.map(({ total, device }) => Math.max(total, device)));
    const list = htmlElement("ul", { class: "bars" }, frame);
    for (const stage of seen) {
      const item = htmlElement("li", {}, list),
        parts = Object.entries(stage.parts).filter(([, bytes]) => bytes > 0);
      const told = parts.map(([name, bytes]) => `${name} ${gigabytes(bytes)}`).join(", ");
      const isFull = stage.total > fraction * stage.device;
      const head =
        (grid.dp > 1 && seen.length > grid.pp ? `pipeline ${stage.k}, ` : "") +
        `stage ${stage.s}: ${stage.layers} layers, ${stage.live} micro-batch${stage.live > 1 ? "es" : ""} alive, ` +
        `${gigabytes(stage.total)} of ${gigabytes(stage.device)}`;
      htmlElement("div", isFull ? { class: "no-fit" } : {}, item, isFull ? `${head}: too much` : head);
      const svg = svgElement(
        "svg",
        {
          viewBox: `0 0 ${width} ${row - 26}`,
          preserveAspectRatio: "none",
          role: "img",
          "aria-label": told,
          height: 18,
        },
        item,
      );
      svgElement("title", {}, svg, told);
      svgElement("rect", { class: "idle", x: 0, y: 0, width: (stage.device / most) * width, height: row }, svg);
      let x = 0;
      for (const [name, bytes] of parts) {
        svgElement("rect", { class: PARTS[name], x, y: 0, width: (bytes / most) * width, height: row }, svg);
        x += (bytes / most) * width;
      }
      const end = ((fraction * stage.device) / most) * width;
      svgElement("line", { class: "limit", x1: end, x2: end, y1: 0, y2: row }, svg);
    }
    const legend = htmlElement("ul", { class: "legend" }, frame);
    const used = new Set(seen.flatMap(({ parts }) => Object.keys(parts).filter((name) => parts[name] > 0)));
    for (const [name, kind] of [...Object.entries(PARTS).filter(([part]) => used.has(part)), ["free", "idle"]]) {
      const item = htmlElement("li", {}, legend);
      svgElement(
        "rect",
        { class: kind, width: 14, height: 14, rx: 2 },
        svgElement("svg", { viewBox: "0 0 14 14", "aria-hidden": "true" }, item),
      );
      item.append(name);
    }
    if (seen.length < stages.length)
      htmlElement("p", {}, frame, `All ${grid.dp} pipelines are alike; the first one is shown.`);
  }

  function update() {
    try {
      const job = readJob(),
        devices = readDevices(fields.devices.value),
        fraction = readNumber("percent") / 100;
      const grids = splits(job, devices, fraction, { SCHEDULES, liveMicrobatches });
      if (!grids.length) {
        throw new Error(
          `No dp x pp x tp = ${devices.length} shares ${job.globalBatch} samples and ${job.shape.layers} layers: ` +
            "dp times the samples of a micro-batch has to divide the samples of a step, pp is at most the layers, " +
            "and tp divides heads, key/value heads and MLP width.",
        );
      }
      grids.sort((a, b) => b.fits - a.fits || (a.fits ? b.dp - a.dp || a.tp - b.tp : a.fullness - b.fullness));
      const fitting = grids.filter(({ fits }) => fits).length;
      const grid = grids.find((each) => nameOf(each) === chosen) || grids[0];
      chosen = nameOf(grid);
      problem.textContent = "";
      answer.textContent =
        `${(totalParameters(job.shape) / 1e9).toPrecision(3)} billion parameters. ` +
        (fitting
          ? `${fitting} of ${grids.length} ways to divide ${devices.length} device${devices.length > 1 ? "s" : ""} fit.`
          : `None of ${grids.length} ways fits: ${job.recompute ? "" : "recompute layers, "}` +
            "take more or larger devices, or shorter samples.");
      showTable(grids);
      showPicture(grid, fraction);
    } catch (error) {
      problem.textContent = error.message;
    }
  }

  for (const name of [...Object.keys(MODELS), "own sizes"]) htmlElement("option", { value: name }, fields.preset, name);
  fields.preset.value = "8B";
  fillPreset();
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", (event) => {
    chosen = null;
    if (event.target.name === "preset") fillPreset();
    else if (SHAPE.includes(event.target.name)) fields.preset.value = "own sizes";
    update();
  });
  table.addEventListener("change", (event) => {
    chosen = event.target.value;
    update();
    table.querySelector(`[value="${chosen}"]`).focus();
  });
  update();
})();
