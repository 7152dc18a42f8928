"""How fast are the steps beside what a user would pick instead? All runs interleaved, on the CPU, one table.

    python tools/maintain/benchmark.py                      about three quarters of an hour on two cores
    python tools/maintain/benchmark.py --only '1f1b|one process' --rounds 3

Everyone does the same work: Llama of hidden 256, intermediate 688, 8 layers, 8 heads, 4 key/value heads, vocabulary
512; 32 samples of 128 tokens a step; float32; no clipping, though ours computes the gradient norm; one thread a rank
where not said otherwise. The runs of a group, and those that they are compared with, are started together and take
turns: in a round each does one step while the others are stopped. The first step is dropped. A run's figure is the
median of its steps; a ratio is the median of the rounds' ratios, given with its quartiles. Runs whose losses differ by
more than 1e-5, or whose last step's gradient norm by more than one part in 10,000, are no peers.

torch's schedules: "zero bubble" is ScheduleInterleavedZeroBubble with one stage a rank, "interleaved" ones have two
stages a rank, and so has "zero bubble V", which is ScheduleZBVZeroBubble.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

from contestants import BASELINE, GROUPS, RUNS, Run
from launch import ROOT, STEPS, Help, metrics
from turns import Program

TOKENS_A_STEP = 32 * 128


def main():
    args = parse_args()
    if not (chosen := [run for run in RUNS if re.search(args.only, run.name)]):
        sys.exit(f"error: --only {args.only!r} fits none of: {'; '.join(run.name for run in RUNS)}")
    from make_tiny_llama import make  # imports transformers: seconds, too many for --help

    rows, seconds = [], {}
    with tempfile.TemporaryDirectory() as folder:
        make(f"{folder}/model", vocab_size=512, hidden_size=256, intermediate_size=688)
        tokens = make_tokens(folder, args.rounds)
        for group, members in GROUPS.items():
            if mine := [run for run in members if run in chosen]:
                others = {BASELINE} | {name for run in mine for name, _ in run.against}
                runs = mine + [run for run in chosen if run.name in others and run not in mine]
                seconds[group] = take_turns(runs, folder, tokens, args)
                rows += summarise(group, mine, seconds[group])
                print_table(rows[-len(mine):])
    print_table(rows)
    if args.json:
        record = {"torch": __import__("torch").__version__, "cores": os.cpu_count(), "rows": rows, "seconds": seconds}
        pathlib.Path(args.json).write_text(json.dumps(record, indent=1))
    if args.plot:
        plot(rows, args.plot)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--rounds", type=int, default=20, help="of the runs of a group")
    parser.add_argument("--only", default="", metavar="REGEX", help="run those whose name fits")
    parser.add_argument("--json", metavar="PATH", help="write every figure")
    parser.add_argument("--plot", metavar="PNG", help="draw the ratios of the table")
    parser.add_argument("--old", metavar="CHECKOUT", help="take the steps from another checkout of this repository")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return args


def make_tokens(folder: str, rounds: int) -> str:
    """The file of token ids that the loader of step 3 caches: ours find it there, the peers read it."""
    program = ("import sys; sys.path.insert(0, sys.argv[1]); from dataloader import encode_to_file; "
               "print(encode_to_file('sotu', sys.argv[2], int(sys.argv[3]), sys.argv[4]))")
    num_tokens = (rounds + 1) * TOKENS_A_STEP + 1
    arguments = [STEPS["3"], f"{folder}/model", num_tokens, f"{folder}/token_cache"]
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]


def take_turns(runs: list[Run], folder: str, tokens: str, args) -> dict[str, list[float]]:
    """The seconds of each run's steps, one a round: {name: [...]}. Exits where two runs did not do the same work."""
    programs = []
    try:
        for run in runs:
            programs.append(start(run, folder, tokens, args))
            programs[-1].turn()
        seconds = {run.name: [] for run in runs}
        for number in range(1, args.rounds + 1):
            for program in programs:
                seconds[program.name].append(program.turn())
            speeds = (f"{name} {TOKENS_A_STEP / times[-1]:.0f}" for name, times in seconds.items())
            print(f"round {number}/{args.rounds}, tokens/s: {', '.join(speeds)}", flush=True)
        for program in programs:
            program.end()
    finally:
        for program in programs:
            program.kill()
    check_losses({run.name: read_results(run, folder) for run in runs})
    return seconds


def start(run: Run, folder: str, tokens: str, args) -> Program:
    common = [*run.flags.split(), "--model_name", f"{folder}/model"]
    if run.step is None:
        return Program(run.name, run.ranks, ROOT / "tools/maintain/peers.py", *common, "--tokens", tokens, "--out",
                       results_path(run, folder), "--steps", args.rounds + 1, "--threads", run.threads,
                       threads=run.threads)
    script = pathlib.Path(args.old or ROOT, STEPS[str(run.step)].relative_to(ROOT), "train.py")
    if "--max_grad_norm" in script.read_text():  # an --old checkout may be from before it
        common += ["--max_grad_norm", "0"]
    return Program(run.name, run.ranks, script, *common, "--log_dir", folder, "--run_name", run.name, "--seq_len", 128,
                   "--learning_rate", 3e-4, "--max_tokens", (args.rounds + 1) * TOKENS_A_STEP,
                   "--omp_num_threads", run.threads, threads=run.threads)


def results_path(peer: Run, folder: str) -> str:
    return os.path.join(folder, f"{peer.name}.json")


def read_results(run: Run, folder: str) -> dict:
    """{"losses": [one a step], "grad_norm": the last step's, or None}"""
    if run.step is None:
        with open(results_path(run, folder)) as file:
            return json.load(file)
    rows = metrics(folder, run.name)
    return {"losses": [row["loss"] for row in rows], "grad_norm": rows[-1].get("grad_norm")}  # --old may have none


def check_losses(results: dict[str, dict]) -> None:
    """Exits where two runs did not do the same work; compiled runs are allowed ten times as much, of reordered sums.

    AdamW hardly sees the scale of gradients, and so the losses don't: their norm must agree too.
    """
    reference = next(iter(results.values()))
    for name, result in results.items():
        reordered = 10 if "compile" in name else 1
        worst = max(abs(a - b) for a, b in zip(reference["losses"], result["losses"], strict=True))
        if worst > 1e-5 * reordered:
            sys.exit(f"error: the losses of {name!r} are off by {worst:.1e}: not the same work, nothing to compare")
        norms = result["grad_norm"], reference["grad_norm"]
        if None not in norms and not abs(norms[0] / norms[1] - 1) <= 1e-4 * reordered:  # a NaN is no agreement
            sys.exit(f"error: the gradient norm of {name!r} is {norms[0]:.6f} and not {norms[1]:.6f}: "
                     "not the same work, nothing to compare")


def summarise(group: str, runs: list[Run], seconds: dict[str, list[float]]) -> list[dict]:
    """One row a run: tokens/s, and its speed against other runs."""
    rows = []
    for run in runs:
        def against(other: str) -> list[float]:
            """The rounds' ratios: lower quartile, median, upper quartile."""
            ratios = [theirs / ours for theirs, ours in zip(seconds[other], seconds[run.name])]
            return statistics.quantiles(ratios, n=4, method="inclusive")

        rows.append({
            "group": group, "name": run.name, "ours": run.step is not None,
            "tokens_per_second": TOKENS_A_STEP / statistics.median(seconds[run.name]),
            "against": [{"name": other, "bar": bar, "quartiles": against(other)}
                        for other, bar in run.against if other in seconds]})
    return rows


def print_table(rows: list[dict]) -> None:
    print("\n| run | tokens/s | against | ratio | quartiles | at least |")
    print("| --- | ---: | --- | ---: | --- | ---: |")
    group = None
    for row in rows:
        if row["group"] != group:
            group = row["group"]
            print(f"| **{group}** | | | | | |")
        cells = [(row["name"], f"{row['tokens_per_second']:.0f}")] + [("", "")] * (len(row["against"]) - 1)
        for (name, speed), other in zip(cells, row["against"] or [None]):
            if other is None:
                print(f"| {name} | {speed} | | | | |")
                continue
            bar = "" if other["bar"] is None else f"{other['bar']:.2f}"
            lower, median, upper = other["quartiles"]
            print(f"| {name} | {speed} | {other['name']} | {median:.2f} | {lower:.2f} to {upper:.2f} | {bar} |")


def plot(rows: list[dict], path: str) -> None:
    """The table's ratios, with their quartiles: in the second panel those to one process of ours."""
    from matplotlib.figure import Figure

    pairs = [(row, other) for row in rows if row["ours"] for other in row["against"]]
    over_one = [pair for pair in pairs if pair[1]["name"] == BASELINE]
    beside = [pair for pair in pairs if pair not in over_one]
    figure = Figure(figsize=(9, 0.26 * len(pairs) + 2), layout="constrained")
    panels = figure.subplots(2, 1, height_ratios=(len(beside), len(over_one)))
    titles = ("ours : what it is compared with, at the same work", f"ours : {BASELINE} with one thread")
    for axes, found, title in zip(panels, (beside, over_one), titles):
        for y, (row, other) in enumerate(reversed(found)):
            lower, median, upper = other["quartiles"]
            axes.plot((lower, upper), (y, y), color="#8fb4d9", linewidth=5, solid_capstyle="butt")
            axes.plot(median, y, "o", color="#14497f", markersize=5)
            axes.text(1.01, y, f"{median:.2f}", transform=axes.get_yaxis_transform(), va="center", fontsize=8)
        names = [row["name"] if other["name"] == BASELINE else f"{row['name']}  :  {other['name']}"
                 for row, other in reversed(found)]
        axes.set_yticks(range(len(found)), names, fontsize=8)
        axes.axvline(1, color="black", linewidth=0.8, linestyle=":")  # equally fast
        axes.set_title(title, loc="left", fontsize=10, weight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlim=(0, None), ylim=(-0.7, len(found) - 0.3))
    panels[1].set_xlabel("times as fast: medians and quartiles of the rounds", fontsize=9)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
