"""How fast are the steps beside what a user would pick instead, and what do their ranks hold? In tables.

    python tools/maintain/measure_course.py speed                  about three quarters of an hour on two cores
    python tools/maintain/measure_course.py speed --only '1f1b|one process' --rounds 3
    python tools/maintain/measure_course.py peaks                  GB of a rank, of several topologies
    python tools/maintain/measure_course.py shards                 bytes a parameter, steps 12 and 13 (8 GB of memory)
    python tools/maintain/measure_course.py activations            MB that are kept for backward, steps 14 and 15
    python tools/maintain/measure_course.py muon --rounds 6        step 18: losses beside AdamW's, its part of a step
    python tools/maintain/measure_course.py gpu --gpu H100 --rounds 3     step 3 beside Hugging Face's Llama
    python tools/maintain/measure_course.py gpu --device cpu --shape toy --seq_len 32    the same code without a GPU

Of `speed`, everyone does the same work: Llama of hidden 256, intermediate 688, 8 layers, 8 heads, 4 key/value heads,
vocabulary 512; 4096 tokens a step, in samples of 128 where not said otherwise; float32; no clipping, though ours
computes the gradient norm; one thread a rank. The runs of a group, and those that they are compared with, are started
together and take turns, see turns.py. A run's figure is the median of its steps; a ratio is the median of the rounds'
ratios, given with its quartiles. Runs whose losses differ by more than 1e-5, or whose last step's gradient norm by more
than one part in 10,000, are no peers.

torch's schedules: "zero bubble" is ScheduleInterleavedZeroBubble with one stage a rank, "interleaved" ones have two
stages a rank, and so has "zero bubble V", which is ScheduleZBVZeroBubble.
"""

import argparse
import functools
import pathlib
import re
import statistics
import sys
import tempfile

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

from lab.launch import Help
from maintain import course_gpu, course_memory, course_muon
from maintain.contestants import GROUPS, RUNS, TOKENS_A_STEP, Run, check_losses, make_tokens, read_results, start
from maintain.turns import keep, programs_in_turns, table, times_as_fast


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("what", choices=MEASUREMENTS, help="to measure")
    parser.add_argument("--only", default="", metavar="REGEX", help="run those whose name fits")
    parser.add_argument("--rounds", type=int, default=20, help="of turns")
    parser.add_argument("--layers", type=int, default=9, help="of shards: 9 are 108 million parameters")
    parser.add_argument("--seq_len", type=int, default=4096, help="of activations and gpu: tokens in a sample")
    parser.add_argument("--json", type=pathlib.Path, help="keep the seconds of each step here")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="of gpu")
    parser.add_argument("--shape", choices=course_gpu.SHAPES, default="tinyllama", help="of gpu: of the model")
    parser.add_argument("--gpu", metavar="NAME", help="the MFU is of this data sheet of tools/sizes/data_sheets.py")
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: at least 1")
    MEASUREMENTS[args.what](args)


def speed(args) -> None:
    if not (chosen := [name for name in RUNS if re.search(args.only, name)]):
        sys.exit(f"error: --only {args.only!r} fits none of: {'; '.join(RUNS)}")
    from maintain.make_tiny_llama import make  # imports transformers: seconds, too many for --help

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        make(f"{folder}/model", vocab_size=512, hidden_size=256, intermediate_size=688)
        tokens = make_tokens(folder, (args.rounds + 1) * TOKENS_A_STEP + 1)
        for group, members in GROUPS.items():
            if mine := [run for run in members if run.name in chosen]:
                others = {name: RUNS[name] for run in mine for name, _ in run.against if name in chosen}
                found[group] = measure({run.name: run for run in mine} | others, folder, tokens, args)
                keep(args.json, group, {"seconds": found[group]})
    print(table_of_speed(found))


def measure(runs: dict[str, Run], folder: str, tokens: str, args) -> dict[str, list[float]]:
    """The seconds of each run's steps: {name: [...]}. Exits where two runs did not do the same work."""
    seconds = programs_in_turns({name: functools.partial(start, run, folder, tokens, args.rounds + 1)
                                 for name, run in runs.items()}, args.rounds)
    check_losses({name: read_results(run, folder) for name, run in runs.items()})
    return seconds


def table_of_speed(found: dict[str, dict[str, list[float]]]) -> str:
    """Our runs' tokens a second, and their speed against others, from {group: {name: seconds}}."""
    rows = []
    for group, seconds in found.items():
        for run in (run for run in GROUPS[group] if run.step and run.name in seconds):
            first = [run.name, f"{TOKENS_A_STEP / statistics.median(seconds[run.name]):.0f}"]
            for other, bar in [pair for pair in run.against if pair[0] in seconds] or [(None, None)]:
                ratio = ["", ""]
                if other:
                    lower, median, upper = times_as_fast(seconds[run.name], seconds[other])
                    ratio = [f"{median:.2f}", f"{lower:.2f} to {upper:.2f}"]
                rows.append([*first, other or "", *ratio, f"{bar:.2f}" if bar else ""])
                first = ["", ""]
    return table(["run", "tokens/s", "against", "ratio", "quartiles", "at least"], rows)


MEASUREMENTS = {"speed": speed, "gpu": course_gpu.gpu, "peaks": course_memory.peaks, "shards": course_memory.shards,
                "activations": course_memory.activations, "muon": course_muon.muon}

if __name__ == "__main__":
    main()
