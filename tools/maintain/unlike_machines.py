"""What planning is worth, and how well it predicts: plans on three unlike hosts of the test bed, in turns.

    python tools/maintain/unlike_machines.py --json assets/unlike_machines.json speeds links tp   # as root: 40 minutes
    python tools/maintain/unlike_machines.py --json assets/unlike_machines.json --plot assets/unlike_machines.png

speeds   quotas of 100, 50 and 25 % of a core, fast links, the tiny Llama: the plan against uniform splits and against
         each machine alone
links    10 Mbit/s, equal speeds, 6 M parameters, 4096 tokens a step: the plan against data parallelism, and what
         travels in float32, bfloat16 or int8
tp       quotas of 80, 40 and 40 %, fast links, the tiny Llama: a host of two ranks beside two hosts of one, in
         pipelines of unlike tp

The machines are measured first. Then the candidates are trained in turns, round by round, each in processes of its own.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import pathlib
import statistics
import tempfile

from hosts_bench import Bench, bed, on_a_disk, predict
from launch import ROOT, Help, metrics

CASES = {  # speeds: percent of a core; batch: samples a step; sizes: to choose from; model: changes; steps of a run
    "speeds": dict(speeds=(100, 50, 25), rate="off", batch=56, sizes="1,2,4", model={}, steps=3),
    "links": dict(speeds=(50, 50, 50), rate="10mbit", batch=32, sizes="1,2,4", steps=2,
                  model=dict(hidden_size=256, intermediate_size=688, head_dim=32)),
    "tp": dict(speeds=(80, 40, 40), rate="off", batch=56, sizes="1,2,4", model={}, steps=3, ranks=(2, 1, 1)),
}

TITLES = {"speeds": "Speeds 4:2:1, fast links, 7168 tokens a step",
          "links": "10 Mbit/s, equal speeds, 4096 tokens a step"}


def run(bench: Bench, candidates: dict[str, dict], rounds: int) -> dict:
    """All candidates (name -> plan.json), round by round. Step seconds of each; a run's first step does not count."""
    seconds, losses = {name: [] for name in candidates}, {}
    flags = {name: [*bench.by_plan(name, plan), "--max_steps", bench.case["steps"], "--replan", "off"]
             for name, plan in candidates.items()}
    bench.train([(f"{name}_{k}", flags[name]) for k in range(rounds) for name in flags])
    for name in candidates:
        for k in range(rounds):
            rows = metrics(on_a_disk(bench.folder / "runs" / f"{name}_{k}").parent, f"{name}_{k}")
            seconds[name] += [row["step_seconds"] for row in rows[1:]]
            losses[name] = [row["loss"] for row in rows]
    return {"cluster": bench.cluster, "losses": losses, "candidates": {
        name: {"plan": plan, "predicted": plan["predicted"]["step_seconds"], "measured": seconds[name]}
        for name, plan in candidates.items()}}


def candidates_of_speeds(bench: Bench, add: dict[str, dict]) -> None:
    layers, batch = 8, CASES["speeds"]["batch"]
    add["plan"] = bench.plan()
    add["uniform, data parallel"] = bench.predict(4, *(((k,), (layers,), n) for k, n in enumerate((5, 5, 4))))
    add["uniform, one pipeline"] = bench.predict(4, ((0, 1, 2), (3, 3, 2), batch // 4))
    for k in range(3):
        add[f"machine {k} alone"] = bench.predict(4, ((k,), (layers,), batch // 4))
    add["pipeline 5,2,1"] = bench.predict(2, ((0, 1, 2), (5, 2, 1), batch // 2))
    add["pipeline 1,2,5"] = bench.predict(1, ((2, 1, 0), (1, 2, 5), batch))
    add["8; 5,3"] = bench.predict(2, ((0,), (8,), 16), ((1, 2), (5, 3), 12))
    add["6,2; 8"] = bench.predict(2, ((0, 2), (6, 2), 20), ((1,), (8,), 8))
    add["shares 8;4;2"] = bench.predict(4, ((0,), (8,), 8), ((1,), (8,), 4), ((2,), (8,), 2))
    add["two machines"] = bench.predict(2, ((0,), (8,), 19), ((1,), (8,), 9))


def candidates_of_links(bench: Bench, add: dict[str, dict]) -> None:
    for dtype in (None, "bfloat16", "int8"):
        name = "plan" if dtype is None else f"plan, {dtype}"
        add[name] = bench.plan(*(("--wire_dtype", dtype) if dtype else ()))
        for schedule in ("1f1b", "1f1b-2"):
            name = ", ".join(filter(None, ("3,3,2", schedule, dtype)))
            add[name] = bench.predict(1, ((0, 1, 2), (3, 3, 2), 32), wire_dtype=dtype, schedule=schedule)
    add["pipeline 4,4"] = bench.predict(2, ((0, 1), (4, 4), 16))
    add["machine 0 alone"] = bench.predict(4, ((0,), (8,), 8))
    data_parallel = [((0,), (8,), 11), ((1,), (8,), 11), ((2,), (8,), 10)]
    for dtype in (None, "bfloat16", "int8"):
        name = f"data parallel, {dtype}" if dtype else "data parallel"
        add[name] = bench.predict(1, *data_parallel, gradient_wire_dtype=dtype)


def candidates_of_tp(bench: Bench, add: dict[str, dict]) -> None:
    """Ranks 0 and 1 are on node0."""
    whole, (both, b, c) = (8,), ((0, 1), (2,), (3,))
    add["plan"] = bench.plan()
    add["without, shares"] = bench.predict(4, *(((k,), whole, n) for k, n in enumerate((4, 4, 3, 3))))
    add["tp 2;1;1"] = bench.predict(4, (both, whole, 6, 2), (b, whole, 4), (c, whole, 4))
    add["tp 2;1, 4,4"] = bench.predict(2, (both, whole, 14, 2), ((*b, *c), (4, 4), 14))
    add["tp 2;1, 5,3"] = bench.predict(2, (both, whole, 12, 2), ((*c, *b), (5, 3), 16))
    add["tp 2;1"] = bench.predict(4, (both, whole, 8, 2), (b, whole, 6))
    add["tp 2 alone"] = bench.predict(4, (both, whole, 14, 2))


CANDIDATES = {"speeds": candidates_of_speeds, "links": candidates_of_links, "tp": candidates_of_tp}


def measure(args, results: dict) -> None:
    bed("up")
    try:
        for name in args.cases:
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(CASES[name], pathlib.Path(folder))
                bench.prepare()
                CANDIDATES[name](bench, candidates := {})
                results[name] = run(bench, candidates, args.rounds)
            args.json.write_text(json.dumps(results, indent=1))
            print(table(results[name]), flush=True)
    finally:
        bed("down")


def predict_again(result: dict) -> None:
    """By the planner as it is now, from the machines as they were measured."""
    for found in result["candidates"].values():
        plan = found["plan"]
        pipelines = [[each[key] for key in ("machines", "layers", "num_microbatches", "tp_size")]
                     for each in plan["pipelines"]]
        setting = {key: plan[key] for key in ("schedule", "wire_dtype", "gradient_wire_dtype", "recompute")}
        again = predict(result["cluster"], plan["micro_batch_size"], pipelines, setting)
        found["predicted"] = again["predicted"]["step_seconds"]


def table(result: dict) -> str:
    """In Markdown. All candidates have to have the loss of the same samples."""
    first = [losses[0] for losses in result["losses"].values()]
    assert max(first) - min(first) < 0.05, f"not the same step: {result['losses']}"
    lines = ["| plan | layers | micro-batches | machines | schedule | measured s | smallest - largest | predicted s | "
             "measured / predicted |", "| --- | --- | --- | --- | --- | ---: | --- | ---: | ---: |"]
    for name, found in sorted(result["candidates"].items(), key=lambda item: statistics.median(item[1]["measured"])):
        seconds, plan = found["measured"], found["plan"]
        measured, predicted, pipelines = statistics.median(seconds), found["predicted"], plan["pipelines"]
        layers = ";".join(",".join(map(str, each["layers"])) for each in pipelines)
        machines = "; ".join(",".join(map(str, each["machines"])) for each in pipelines)
        numbers = ",".join(str(each["num_microbatches"]) for each in pipelines)
        schedule = plan["schedule"] if max(len(each["layers"]) for each in pipelines) > 1 else ""
        lines.append(f"| {name} | `{layers}` | {numbers} of {plan['micro_batch_size']} | {machines} | {schedule} | "
                     f"{measured:.2f} | {min(seconds):.2f} - {max(seconds):.2f} | {predicted:.2f} | "
                     f"{measured / predicted:.2f} |")
    return "\n".join(lines)


def draw(results: dict, picture: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(17, 6.5), dpi=85, layout="constrained")
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 0.8))
    for ax, (name, title) in zip(axes, TITLES.items()):
        found = results[name]["candidates"]
        rows = sorted(found, key=lambda key: -statistics.median(found[key]["measured"]))
        for y, key in enumerate(rows):
            times = found[key]["measured"]
            ax.barh(y, median := statistics.median(times), color="#0072b2" if key.startswith("plan") else "#b8c4cc")
            ax.plot([min(times), max(times)], [y, y], color="black", linewidth=1)
            ax.plot(found[key]["predicted"], y, "D", color="#d55e00", markersize=5)
            ax.text(max(*times, found[key]["predicted"]), y, f"  {median:.2f} s", va="center", fontsize=9.5)
        ax.set_yticks(range(len(rows)), rows)
        ax.set(xlabel="seconds a step", xlim=(0, ax.get_xlim()[1] * 1.13))
        ax.set_title(title, loc="left", fontsize=11.5, weight="bold")
    everything = [(found["predicted"], statistics.median(found["measured"]))
                  for result in results.values() for found in result["candidates"].values()]
    lowest, highest = 0.8 * min(map(min, everything)), 1.25 * max(map(max, everything))
    axes[2].fill_between([lowest, highest], [0.85 * lowest, 0.85 * highest], [1.15 * lowest, 1.15 * highest],
                         color="#e9eef2", label="within 15 %")
    axes[2].plot(*zip(*everything), "D", color="#d55e00", markersize=5)
    axes[2].set(xscale="log", yscale="log", xlim=(lowest, highest), ylim=(lowest, highest), aspect="equal",
                xlabel="predicted seconds a step", ylabel="measured (median)")
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50) if lowest < tick < highest]
    axes[2].set_xticks(ticks, ticks)
    axes[2].set_yticks(ticks, ticks)
    axes[2].minorticks_off()
    axes[2].legend(frameon=False, loc="upper left")
    axes[2].set_title("Prediction", loc="left", fontsize=11.5, weight="bold")
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Plans on three hosts. Bars: measured medians, with smallest to largest; diamonds: predicted",
                    x=0.01, ha="left", fontsize=14)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("cases", nargs="*", help=f"to measure: {', '.join(CASES)}. Without one, what --json holds is "
                                                 "predicted again, by the planner as it is now")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "runs" / "unlike_machines.json",
                        help="what was measured")
    parser.add_argument("--rounds", type=int, default=3, help="each candidate trains so often")
    parser.add_argument("--plot", help="draw what --json holds")
    args = parser.parse_args()
    if unknown := {*args.cases} - {*CASES}:
        parser.error(f"no case {unknown.pop()!r}: choose among {', '.join(CASES)}")
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    if args.cases:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        measure(args, results)
    for name, result in results.items() if not args.cases else ():
        predict_again(result)
        print(name, table(result), sep="\n")
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
