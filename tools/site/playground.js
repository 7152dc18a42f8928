// The page on which schedules are tried out: reads the form, simulates, draws. See simulation.js and figure.js.
"use strict";

(() => {
  const form = document.getElementById("playground"),
    facts = document.getElementById("facts");
  const figure = new BarFigure(document.getElementById("picture"), "The schedule");
  const NAMES = { F: "forward", B: "backward", W: "gradients of weights" };
  const MESSAGES = { F: "hidden states", B: "gradient" };

  /** What simulate() takes. Of the speeds, as many count as there are stages. */
  function read() {
    const schedule = form.elements.schedule.value;
    form.querySelectorAll("#speeds input").forEach((field, s) => (field.disabled = s >= form.elements.p.value));
    form.elements.v.disabled = !schedule.startsWith("interleaved");
    const { F, B, W, ...numbers } = numbersOf(form);
    const speeds = Array.from({ length: numbers.p }, (_, s) => numbers[`speed${s}`]);
    return { ...numbers, schedule, v: chunksOf(schedule, numbers.v), costs: { F, B, W }, speeds };
  }

  const short = (value) => String(Number(value.toPrecision(4)));
  const percent = (share) => `${(100 * share).toFixed(1)} %`;
  const times = ({ start, end }) => `from ${short(start)} to ${short(end)}`;

  function tellFacts(options, result) {
    const { m, v } = options,
      most = Math.max(...result.live),
      ofChunks = v > 1 ? ` (${most} chunks)` : "";
    const ideal = simulate({ ...options, costs: { F: 1, B: 1, W: 1 }, transfer: 0, latency: 0, speeds: null }).bubble;
    const rows = [
      ["Step time", short(result.makespan), `${short(result.makespan / m)} a micro-batch`],
      ["Bubble", percent(result.bubble), `${percent(ideal)} if all costs were equal, messages free`],
      ["Activations alive", short(most / v), `micro-batches${ofChunks}, on the stage that keeps most`],
      [
        "Messages",
        result.transfers.length,
        `${short(result.transfers.length * options.transfer)} of time on the links`,
      ],
    ];
    showFacts(facts, rows);
  }

  function draw(options, result) {
    const isDivided = result.spans.some(({ kind }) => kind === "W");
    const bars = result.spans.map((span) => ({
      row: span.stage,
      track: 0,
      start: span.start,
      end: span.end,
      kind: { F: "forward", B: "backward", W: "weights" }[span.kind],
      label: span.microbatch + "′".repeat(span.chunk),
      text:
        `Stage ${span.stage}: ${NAMES[span.kind]} of micro-batch ${span.microbatch}` +
        `${options.v > 1 ? ` in chunk ${span.chunk}` : ""}, ${times(span)}`,
    }));
    for (const { source, destination, kind, microbatch, start, end } of result.transfers) {
      if (end > start) {
        bars.push({
          row: destination,
          track: kind === "F" ? 1 : 2,
          start,
          end,
          kind: "transfer",
          label: "",
          text:
            `Message from stage ${source} to stage ${destination}: ${MESSAGES[kind]} of ` +
            `micro-batch ${microbatch}, ${times({ start, end })}`,
        });
      }
    }
    const hasMessages = bars.length > result.spans.length;
    const rows = result.live.map((_, s) => ({ name: `stage ${s}`, tracks: hasMessages ? 3 : 1 }));
    const legend = [
      ["forward", "forward"],
      ["backward", isDivided ? "gradient of the input" : "backward"],
    ];
    if (isDivided) legend.push(["weights", "gradients of weights"]);
    if (hasMessages) legend.push(["transfer", "message that is received"]);
    legend.push(["idle", "idle"]);
    bars.sort((a, b) => a.row - b.row || a.track - b.track || a.start - b.start);
    figure.show(rows, bars, result.makespan || 1, legend);
    document.getElementById("stages").replaceChildren(
      ...result.live.map((live, s) => {
        const busy = result.spans
          .filter((span) => span.stage === s)
          .reduce((sum, span) => sum + span.end - span.start, 0);
        const row = htmlElement("tr", {});
        htmlElement("th", { scope: "row" }, row, String(s));
        const idle = result.makespan ? 1 - busy / result.makespan : 0;
        for (const text of [short(live / options.v), short(busy), percent(idle)]) htmlElement("td", {}, row, text);
        return row;
      }),
    );
  }

  followForm(form, () => {
    const options = read(),
      result = simulate(options);
    tellFacts(options, result);
    draw(options, result);
  });
})();
