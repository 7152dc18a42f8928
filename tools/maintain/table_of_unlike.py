"""What three unlike machines reach together, beside the sum of what each reaches alone: one table.

    python tools/maintain/table_of_unlike.py                       # as root, on the test bed: all cases, about an hour
    python tools/maintain/table_of_unlike.py "4:2:1 fast" --rounds 2     # one case; the others stay in --json

by speed    train_distributed.py without flags for the layout: each machine has the whole model, samples are shared out
            by speed. It measures that before the first step, and corrects it by the first steps
plan        what plan.py chose for the measured machines
even        --equal_shares
alone       the fastest machine by itself, the others idle, with the same samples a step
each alone  all three at the same time, but each by itself, with its part of the samples. The sum of these is what they
            can reach. (The hosts of the test bed share a processor, so each is measured while others compute.)

All of them train the same samples, from the same weights, in turns, round by round. The step takes 2 s or more, because
its samples are chosen by the speeds that are measured first. A step is timed from the end of the one before to its own,
by rank 0's clock: all that happens between two steps is in it. The steps before work has settled do not count, nor does
the last one of a run, behind which a checkpoint is saved.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import pathlib
import statistics
import tempfile
from itertools import pairwise, product

from hosts_bench import Bench, bed, on_a_disk
from launch import ROOT, Help, metrics


SIZE, LAYERS, SECONDS = 4, 8, 2.2  # samples of a micro-batch; of the tiny Llama; of a step, if all compute all the time
SETTLED = 5  # steps: the early move of --replan is made after the fourth one, or sooner
QUOTAS = {"4:2:1": (100, 50, 25), "2:1:1": (80, 40, 40), "60:30:15": (60, 30, 15)}  # percent of a core
NETWORKS = {"fast": "off", "100 Mbit/s": "100mbit"}
CASES = {f"{speeds} {network}": dict(speeds=quotas, rate=rate, flags=[])
         for speeds, quotas in QUOTAS.items() for network, rate in NETWORKS.items()}
CASES["4:2:1 fast, LoRA"] = {**CASES["4:2:1 fast"], "flags": ["--lora_rank", "16"]}
OURS, EACH = ("by speed", "plan"), "each alone"


def measure(case: dict, rounds: int, folder: pathlib.Path) -> dict:
    bench = Bench({**case, "model": {}, "sizes": f"1,2,{SIZE}"}, folder)
    if case["flags"]:
        write_weights(bench.model)
    bench.prepare()
    seconds = [(sum(machine["forward"][str(SIZE)]) + sum(machine["backward"][str(SIZE)])) / SIZE
               for machine in bench.cluster["machines"]]  # of a sample
    unit = SIZE * len(seconds)
    bench.case["batch"] = batch = unit * round(SECONDS * sum(1 / each for each in seconds) / unit)
    plan, by_speed = bench.plan(), ["--batch_size", SIZE, "--gradient_accumulation", batch // unit]
    flags = {"by speed": by_speed, "plan": bench.by_plan("plan", plan), "even": [*by_speed, "--equal_shares"]}
    fastest = seconds.index(min(seconds))
    flags["alone"] = bench.by_plan("alone", bench.predict(SIZE, ((fastest,), (LAYERS,), batch // SIZE)))
    flags = {name: [*own, "--max_steps", SETTLED + 4 if name in OURS else 4] for name, own in flags.items()}
    parts = [max(1, round(batch / SIZE / each / sum(1 / each for each in seconds))) for each in seconds]
    flags[EACH] = [["--batch_size", SIZE, "--gradient_accumulation", part, "--max_steps", SETTLED + 1]
                   for part in parts]
    said = bench.train([(f"{name}_{k}", own) for k in range(rounds) for name, own in flags.items()])
    print(*(line for line in said.splitlines() if "samples of a step" in line or "work moves" in line), sep="\n")
    return {"batch": batch, "tokens": batch * bench.cluster["seq_len"], "cluster": bench.cluster, "plan": plan,
            "parts": parts, "seconds": read_seconds(bench, flags, rounds)}


def read_seconds(bench: Bench, names, rounds: int) -> dict[str, list[float]]:
    """Of the steps that count. All have to have the loss of the same samples."""
    seconds, losses = {}, {}
    for name, k in product(names, range(rounds)):
        for run in ([f"{name}_{k}_{rank}" for rank in range(3)] if name == EACH else [f"{name}_{k}"]):
            folder = on_a_disk(bench.folder / "runs" / run / "ends.txt").parent
            ends = [float(line) for line in (folder / "ends.txt").read_text().split()]
            key = f"{name} {run[-1]}" if name == EACH else name
            seconds.setdefault(key, []).extend(end - start for start, end in
                                               pairwise(ends[SETTLED - 1 if name in OURS else 0:-1]))
            if name != EACH:
                losses[name] = metrics(folder.parent, run)[0]["loss"]
    assert max(losses.values()) - min(losses.values()) < 0.01, f"not the same step: {losses}"
    return seconds


def write_weights(model: pathlib.Path) -> None:
    """Random ones, beside which LoRA trains."""
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).save_pretrained(model)


def table(results: dict) -> str:
    """In Markdown, in tokens a second."""
    lines = ["| speeds, network | step s | by speed | plan | its layers | even | fastest alone | each alone | "
             "sum of these | by speed / sum | plan / sum |",
             "| --- | ---: | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: | ---: |"]
    for name, found in results.items():
        step = {key: statistics.median(seconds) for key, seconds in found["seconds"].items()}
        speed = {key: found["tokens"] / step[key] for key in (*OURS, "even", "alone")}
        each = [SIZE * part * found["cluster"]["seq_len"] / step[f"{EACH} {k}"]
                for k, part in enumerate(found["parts"])]
        layers = ";".join(",".join(map(str, pipeline["layers"])) for pipeline in found["plan"]["pipelines"])
        cells = [name, f"{step['by speed']:.2f}", f"{speed['by speed']:.0f}", f"{speed['plan']:.0f}", f"`{layers}`",
                 f"{speed['even']:.0f}", f"{speed['alone']:.0f}", ", ".join(f"{one:.0f}" for one in each),
                 f"{sum(each):.0f}", *(f"{speed[key] / sum(each):.3f}" for key in OURS)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"to measure: {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "runs" / "table_of_unlike.json",
                        help="what was measured; the table is of all cases in it")
    parser.add_argument("--rounds", type=int, default=3, help="each candidate trains so often")
    args = parser.parse_args()
    if unknown := {*args.cases} - {*CASES}:
        parser.error(f"no case {unknown.pop()!r}: choose among {', '.join(CASES)}")
    args.json.parent.mkdir(parents=True, exist_ok=True)
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    bed("up")
    try:
        for name in args.cases or CASES:
            with tempfile.TemporaryDirectory() as folder:
                results[name] = measure(CASES[name], args.rounds, pathlib.Path(folder))
            results = {name: results[name] for name in CASES if name in results}
            args.json.write_text(json.dumps(results, indent=1))
            print(table(results), flush=True)
    finally:
        bed("down")


if __name__ == "__main__":
    main()
