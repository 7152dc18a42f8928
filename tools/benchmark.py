"""How fast are the steps beside what a user would pick instead? All runs interleaved, on the CPU, one table.

    python tools/benchmark.py                      about three quarters of an hour on two cores
    python tools/benchmark.py --only '1f1b|one process' --rounds 1
    python tools/benchmark.py --startup            where the time to the first step goes
    python tools/benchmark.py --gpu                a machine with one or more GPUs

Everyone does the same work: Llama of hidden 256, intermediate 688, 8 layers, 8 heads, 4 key/value heads, vocabulary
512; 32 samples of 128 tokens a step; float32; no clipping, though ours computes the gradient norm; one thread a rank
where not said otherwise. Each round runs everyone once, for 7 steps, the first of which is dropped. A run's figure is
the median of its steps; a ratio is the median of the rounds' ratios, given with its smallest and largest. Runs whose
losses differ by more than 1e-5, or whose last step's gradient norm by more than one part in 10,000, are no peers.

torch's schedules: "zero bubble" is ScheduleInterleavedZeroBubble with one stage a rank, "interleaved" ones have two
stages a rank, and so has "zero bubble V", which is ScheduleZBVZeroBubble.
"""

import argparse
import importlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from launch import ROOT, STEPS, environment, metrics, torchrun

OTHERS = {"--startup": "startup", "--gpu": "benchmark_gpu"}
STEPS_A_RUN, TOKENS_A_STEP = 7, 32 * 128
BASELINE = "step 3, one process"


class Run(NamedTuple):
    """One contestant: the number of the step (None: a peer) with its flags, and what its speed is compared with."""

    name: str
    step: int | None
    ranks: int
    flags: str
    against: tuple[tuple[str, float | None], ...] = ()  # (name, ratio to reach)
    threads: int = 1


def micro_batch(size: int, accumulation: int) -> str:
    return f"--micro_batch_size {size} --gradient_accumulation_steps {accumulation}"


COMPILED = "step 3, --compile"
PP_4, PP_2 = micro_batch(4, 8) + " --pp_size 4", micro_batch(4, 8) + " --pp_size 2"
PP_2_FEW = micro_batch(8, 4) + " --pp_size 2"
DP_4 = micro_batch(1, 8) + " --dp_size 4"
TP_2, TP_4 = micro_batch(4, 8) + " --tp_size 2", micro_batch(4, 8) + " --tp_size 4"
GROUPS = {
    "One process": [
        Run(BASELINE, 3, 1, micro_batch(4, 8), (("Hugging Face", 1.0),)),
        Run("Hugging Face", None, 1, "hf"),
        Run("step 3, 2 threads", 3, 1, micro_batch(4, 8), (("Hugging Face, 2 threads", 1.0), (BASELINE, None)), 2),
        Run("Hugging Face, 2 threads", None, 1, "hf", (), 2),
    ],
    "Two stages": [
        Run("step 8, pp 2, zb, 4 micro-batches", 8, 2, PP_2_FEW + " --pp_engine zb",
            (("torch Schedule1F1B, pp 2, 4 micro-batches", 1.1), ("step 8, pp 2, 1F1B, 4 micro-batches", None))),
        Run("step 8, pp 2, 1F1B, 4 micro-batches", 8, 2, PP_2_FEW,
            (("torch Schedule1F1B, pp 2, 4 micro-batches", None),)),
        Run("torch Schedule1F1B, pp 2, 4 micro-batches", None, 2, "1f1b --microbatches 4"),
        Run("torch zero bubble, pp 2, 4 micro-batches", None, 2, "zb --microbatches 4",
            (("torch Schedule1F1B, pp 2, 4 micro-batches", None),)),
        Run("step 8, pp 2, zb, 8 micro-batches", 8, 2, PP_2 + " --pp_engine zb",
            (("torch Schedule1F1B, pp 2, 8 micro-batches", 1.05), ("step 8, pp 2, 1F1B, 8 micro-batches", None))),
        Run("step 8, pp 2, 1F1B, 8 micro-batches", 8, 2, PP_2,
            (("torch Schedule1F1B, pp 2, 8 micro-batches", None),)),
        Run("torch Schedule1F1B, pp 2, 8 micro-batches", None, 2, "1f1b"),
        Run("torch zero bubble, pp 2, 8 micro-batches", None, 2, "zb",
            (("torch Schedule1F1B, pp 2, 8 micro-batches", None),)),
    ],
    "Four stages, or twice four": [
        Run("step 8, pp 4, zb", 8, 4, PP_4 + " --pp_engine zb",
            (("torch Schedule1F1B", 1.03), ("torch zero bubble", 1.03), ("torch interleaved zero bubble", 1.03),
             ("torch zero bubble V", 1.03), (BASELINE, 1.77))),
        Run("step 8, pp 4, 1F1B", 8, 4, PP_4, (("torch Schedule1F1B", 1.05), (BASELINE, 1.8))),
        Run("torch Schedule1F1B", None, 4, "1f1b", ((BASELINE, None),)),
        Run("torch interleaved 1F1B", None, 4, "interleaved-1f1b", ((BASELINE, None),)),
        Run("torch zero bubble", None, 4, "zb", ((BASELINE, None),)),
        Run("torch interleaved zero bubble", None, 4, "interleaved-zb", ((BASELINE, None),)),
        Run("torch zero bubble V", None, 4, "zbv", ((BASELINE, None),)),
        Run("step 8, pp 4, AFAB", 8, 4, PP_4 + " --pp_engine afab",
            (("torch ScheduleGPipe", None), (BASELINE, None))),
        Run("torch ScheduleGPipe", None, 4, "gpipe", ((BASELINE, None),)),
    ],
    "Data parallel": [
        Run("step 6, dp 4", 6, 4, DP_4, (("torch DDP", 1.0), (BASELINE, 1.45))),
        Run("torch DDP", None, 4, "ddp", ((BASELINE, None),)),
    ],
    "Tensor parallel": [
        Run("step 8, tp 2", 8, 2, TP_2, (("DTensor, tp 2", 1.6), ("Hugging Face, tp 2", None), (BASELINE, 1.15))),
        Run("DTensor, tp 2", None, 2, "dtensor", ((BASELINE, None),)),
        Run("Hugging Face, tp 2", None, 2, "hf-tp", ((BASELINE, None),)),
        Run("step 8, tp 4", 8, 4, TP_4, (("DTensor, tp 4", 1.8), ("Hugging Face, tp 4", None), (BASELINE, None))),
        Run("DTensor, tp 4", None, 4, "dtensor", ((BASELINE, None),)),
        Run("Hugging Face, tp 4", None, 4, "hf-tp", ((BASELINE, None),)),
    ],
    "All three": [
        Run("step 8, 2x2x2", 8, 8, micro_batch(2, 8) + " --tp_size 2 --pp_size 2 --dp_size 2", ((BASELINE, 0.95),)),
    ],
    "Compiled": [
        Run(COMPILED, 3, 1, micro_batch(4, 8) + " --compile", (("Hugging Face", 1.1), (BASELINE, None))),
        Run("Hugging Face, compiled", None, 1, "hf --compile", (("Hugging Face", None),)),
        Run("step 3, --compile, 2 threads", 3, 1, micro_batch(4, 8) + " --compile",
            (("Hugging Face, 2 threads", 1.1), (BASELINE, None)), 2),
        Run("step 8, pp 4, 1F1B, --compile", 8, 4, PP_4 + " --compile",
            (("step 8, pp 4, 1F1B", None), (COMPILED, None))),
        Run("step 6, dp 4, --compile", 6, 4, DP_4 + " --compile", (("step 6, dp 4", None), (COMPILED, None))),
        Run("step 8, tp 2, --compile", 8, 2, TP_2 + " --compile", (("step 8, tp 2", None), (COMPILED, None))),
    ],
}
RUNS = [run for runs in GROUPS.values() for run in runs]


def main():
    if other := next((name for flag, name in OTHERS.items() if flag in sys.argv[1:]), None):
        importlib.import_module(other).main([flag for flag in sys.argv[1:] if flag not in OTHERS])
        return
    args = parse_args()
    chosen = [run for run in RUNS if re.search(args.only, run.name)]
    if not chosen:
        sys.exit(f"error: --only {args.only!r} fits none of: {'; '.join(run.name for run in RUNS)}")
    with tempfile.TemporaryDirectory() as folder:
        make_model(os.path.join(folder, "model"))
        tokens = make_tokens(folder)
        rounds = []
        for number in range(1, args.rounds + 1):
            rounds.append({run.name: execute(run, folder, tokens, args.old) for run in chosen})
            speeds = (f"{name} {TOKENS_A_STEP / result['seconds']:.0f}" for name, result in rounds[-1].items())
            print(f"round {number}/{args.rounds}, tokens/s: {', '.join(speeds)}", flush=True)
    check_losses(rounds)
    rows = summarise(chosen, rounds)
    print_table(rows)
    if args.json:
        record = {"torch": __import__("torch").__version__, "cores": os.cpu_count(), "rows": rows, "rounds": rounds}
        pathlib.Path(args.json).write_text(json.dumps(record, indent=1))
    if args.plot:
        plot(rows, args.plot)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="REGEX", help="run those whose name fits")
    parser.add_argument("--json", metavar="PATH", help="write every figure")
    parser.add_argument("--plot", metavar="PNG", help="draw the speed-ups")
    parser.add_argument("--old", metavar="CHECKOUT", help="take the steps from another checkout of this repository")
    parser.add_argument("--startup", action="store_true", help="measure the start instead; see startup.py --help")
    parser.add_argument("--gpu", action="store_true", help="measure on the GPU instead; see benchmark_gpu.py --help")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    return args


def make_model(folder: str) -> None:
    """A directory in the Hub's format: the benchmark's Llama and a tokenizer of 512 tokens."""
    sys.path.insert(0, str(ROOT / "tools"))
    from make_tiny_llama import make

    make(folder, vocab_size=512, hidden_size=256, intermediate_size=688)


def make_tokens(folder: str) -> str:
    """The file of token ids that the loader of step 3 caches: ours find it there, the peers read it."""
    program = ("import sys; sys.path.insert(0, sys.argv[1]); from dataloader import encode_to_file; "
               "print(encode_to_file('sotu', sys.argv[2], int(sys.argv[3]), sys.argv[4]))")
    num_tokens = STEPS_A_RUN * TOKENS_A_STEP + 1
    arguments = [STEPS["3"], f"{folder}/model", num_tokens, f"{folder}/token_cache"]
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]


def execute(run: Run, folder: str, tokens: str, checkout: str | None) -> dict:
    """Runs one contestant: {"seconds": median of a step, "steps": [...], "losses": [...], "memory_gb": ...}."""
    common = ["--model_name", f"{folder}/model"]
    if run.step is None:
        out = f"{folder}/peer.json"
        command = torchrun(run.ranks, ROOT / "tools" / "peers.py", *run.flags.split(), *common, "--tokens", tokens,
                           "--out", out, "--steps", STEPS_A_RUN, "--threads", run.threads)
    else:
        script = pathlib.Path(checkout or ROOT, STEPS[str(run.step)].name, "train.py")
        command = torchrun(run.ranks, script, *run.flags.split(), *common, "--log_dir", folder, "--seq_len", 128,
                           "--learning_rate", 3e-4, "--max_tokens", STEPS_A_RUN * TOKENS_A_STEP,
                           "--omp_num_threads", run.threads)
        if "--max_grad_norm" in script.read_text():  # an --old checkout may be from before it
            command += ["--max_grad_norm", "0"]
    start = time.perf_counter()
    done = subprocess.run(command, env=environment(OMP_NUM_THREADS=str(run.threads)), text=True, timeout=600,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"error: {run.name} ended with exit code {done.returncode}: {done.stdout[-3000:]}")
    if run.step is None:
        with open(out) as file:
            result = json.load(file)
        losses, seconds, memory, norm = result["losses"], result["step_seconds"], None, result["grad_norm"]
    else:
        rows = metrics(folder)
        losses, seconds = [row["loss"] for row in rows], [row["step_seconds"] for row in rows]
        memory, norm = rows[-1]["memory_gb"], rows[-1].get("grad_norm")  # an --old checkout may be from before it
    return {"seconds": statistics.median(seconds[1:]), "steps": seconds, "losses": losses, "grad_norm": norm,
            "memory_gb": memory, "wall_seconds": time.perf_counter() - start}


def check_losses(rounds: list[dict]) -> None:
    """Exits where two runs did not do the same work; compiled runs are allowed ten times as much, of reordered sums.

    AdamW hardly sees the scale of gradients, and so the losses don't: their norm must agree too.
    """
    reference = next(iter(rounds[0].values()))
    for name, result in ((name, result) for results in rounds for name, result in results.items()):
        reordered = 10 if "compile" in name else 1
        worst = max(abs(a - b) for a, b in zip(reference["losses"], result["losses"], strict=True))
        if worst > 1e-5 * reordered:
            sys.exit(f"error: the losses of {name!r} are off by {worst:.1e}: not the same work, nothing to compare")
        norms = result["grad_norm"], reference["grad_norm"]
        if None not in norms and not abs(norms[0] / norms[1] - 1) <= 1e-4 * reordered:  # a NaN is no agreement
            sys.exit(f"error: the gradient norm of {name!r} is {norms[0]:.6f} and not {norms[1]:.6f}: "
                     "not the same work, nothing to compare")


def summarise(runs: list[Run], rounds: list[dict]) -> list[dict]:
    """One row a run: tokens/s, and against each other run the rounds' ratios as (median, smallest, largest)."""
    rows = []
    for run in runs:
        group = next(name for name, members in GROUPS.items() if run in members)
        row = {"group": group, "name": run.name, "ours": run.step is not None, "against": [],
               "tokens_per_second": statistics.median(TOKENS_A_STEP / r[run.name]["seconds"] for r in rounds)}
        for other, bar in run.against:
            if other in rounds[0]:
                ratios = [r[other]["seconds"] / r[run.name]["seconds"] for r in rounds]
                row["against"].append({"name": other, "bar": bar, "ratio": statistics.median(ratios),
                                       "smallest": min(ratios), "largest": max(ratios)})
        rows.append(row)
    return rows


def print_table(rows: list[dict]) -> None:
    print("\n| run | tokens/s | against | ratio | smallest to largest | at least |")
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
            print(f"| {name} | {speed} | {other['name']} | {other['ratio']:.2f} | "
                  f"{other['smallest']:.2f} to {other['largest']:.2f} | {bar} |")


def plot(rows: list[dict], path: str) -> None:
    """Speed-up over one process with one thread: a bar a run, ours and others' in two colours, with the range."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    base = next(row["tokens_per_second"] for row in rows if row["name"] == BASELINE)
    figure, axes = plt.subplots(figsize=(8, 0.33 * len(rows) + 1.2), layout="constrained")
    for y, row in enumerate(reversed(rows)):
        speed_up = row["tokens_per_second"] / base
        axes.barh(y, speed_up, color="#2a6fb0" if row["ours"] else "#b8bcc2")
        axes.text(speed_up + 0.02, y, f"{speed_up:.2f}", va="center", fontsize=8)
    axes.axvline(2, color="black", linewidth=0.8, linestyle=":")
    axes.text(1.985, len(rows) - 0.4, "both cores, fully used", ha="right", fontsize=8)
    axes.set_yticks(range(len(rows)), [row["name"] for row in reversed(rows)], fontsize=8)
    axes.set_xlabel(f"speed-up over one process with one thread ({base:.0f} tokens/s); ours blue, others' grey")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlim(0, 2.25)
    axes.set_ylim(-0.6, len(rows) + 0.2)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
