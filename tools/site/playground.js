// The page on which schedules are tried out: reads the form, simulates, draws. See simulation.js and figure.js. The
// lists of actions, SCHEDULES, come from the steps' own functions: site_build.py writes them into schedules.js.
"use strict";

(() => {
  const form = document.getElementById("playground"),
    facts = document.getElementById("facts");
  const NAMES = { F: "forward", B: "backward", W: "gradients of weights" };
  const CLASSES = { F: "forward", B: "backward", W: "weights" };

  /** What the form's schedule does, by stage, and what each action costs. Of the speeds, those of its stages count. */
  function read() {
    form.querySelectorAll("#speeds input").forEach((field, s) => (field.disabled = s >= form.elements.p.value));
    const { p, m, F, B, W, message, ...speeds } = numbersOf(form);
    const actions = SCHEDULES[form.elements.schedule.value][p][m].map((stage) =>
      stage.split(" ").map((word) => [word[0], parseInt(word.slice(1)), Number(word.endsWith("'"))]),
    );
    return { m, actions, costs: { F, B, W }, message, speeds: Object.values(speeds) };
  }

  const short = (value) => String(Number(value.toPrecision(4)));
  const percent = (share) => `${(100 * share).toFixed(1)} %`;

  function tellFacts({ m, actions, message }, { makespan, bubble, live, messages, v }) {
    const most = Math.max(...live),
      ideal = play(actions, { F: 1, B: 1, W: 1 }, 0, actions.map(() => 1)).bubble;
    showFacts(facts, [
      ["Step time", short(makespan), `${short(makespan / m)} a micro-batch`],
      ["Bubble", percent(bubble), `${percent(ideal)} if all costs were equal, messages free`],
      ["Activations alive", short(most / v), `micro-batches${v > 1 ? ` (${most} chunks)` : ""}, on the fullest stage`],
      ["Messages", messages, `${short(message)} of time each`],
    ]);
  }

  function draw({ actions }, { spans, makespan, live, v }) {
    const isDivided = spans.some(({ kind }) => kind === "W");
    const bars = spans.map(({ stage, kind, microbatch, chunk, start, end }) => ({
      row: stage,
      start,
      end,
      kind: CLASSES[kind],
      label: microbatch + "′".repeat(chunk),
      text:
        `Stage ${stage}: ${NAMES[kind]} of micro-batch ${microbatch}` +
        `${v > 1 ? ` in chunk ${chunk}` : ""}, from ${short(start)} to ${short(end)}`,
    }));
    const legend = [
      ["forward", "forward"],
      ["backward", isDivided ? "gradient of the input" : "backward"],
      ...(isDivided ? [["weights", "gradients of weights"]] : []),
      ["idle", "idle"],
    ];
    bars.sort((a, b) => a.row - b.row || a.start - b.start);
    showBars(document.getElementById("picture"), actions.map((_, s) => `stage ${s}`), bars, makespan || 1, legend);
    const table = live.map((alive, s) => {
      const busy = bars.filter(({ row }) => row === s).reduce((sum, { start, end }) => sum + end - start, 0),
        row = htmlElement("tr", {});
      htmlElement("th", { scope: "row" }, row, String(s));
      for (const text of [short(alive / v), short(busy), percent(makespan ? 1 - busy / makespan : 0)])
        htmlElement("td", {}, row, text);
      return row;
    });
    document.getElementById("stages").replaceChildren(...table);
  }

  followForm(form, () => {
    const options = read(),
      result = play(options.actions, options.costs, options.message, options.speeds);
    tellFacts(options, result);
    draw(options, result);
  });
})();
