"""Draws the chapters' figures, from runs that it starts itself: assets/figure_*.png.

    python tools/maintain/make_figures.py                      # all of them: about a quarter of an hour on two cores
    python tools/maintain/make_figures.py grid timelines       # some

A machine with two cores can't run four stages at once, and those that compute would be faster while others wait. So
ranks that are to be slower have turns of some milliseconds: of two ranks that take turns, each has half a core.
"""

import argparse
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

from lab.launch import ROOT, STEPS, Help, environment, modules_of, writing
from maintain import course_muon, figures_drawn, figures_measured
from maintain.make_tiny_llama import resized
from maintain.turns import Program

SLICE, REPEATS = 0.004, 5  # seconds of a turn; runs of which the shortest is drawn
LARGER = dict(hidden_size=256, intermediate_size=688, num_attention_heads=8, num_key_value_heads=4, head_dim=32)


def run_slowed(groups: list[list[int]], num_ranks: int, script, *args) -> None:
    """Runs a script on so many ranks. In each turn one of `groups` stands still; the ranks in none always run.

    Turns begin when it prints its first line: all ranks have started by then. Raises SystemExit where a rank fails.
    """
    program = Program(pathlib.Path(script).parent.name, num_ranks, script, *args)
    try:
        program.wait_for_line()
        while groups and None in (codes := [rank.poll() for rank in program.ranks]) and not any(codes):
            for resting in groups:
                for rank in {*sum(groups, [])}:
                    if program.ranks[rank].poll() is None:
                        program.ranks[rank].send_signal(signal.SIGSTOP if rank in resting else signal.SIGCONT)
                time.sleep(SLICE)
        program.end()
    finally:
        program.kill()


def traces(folder: pathlib.Path, runs: dict[str, list], groups: list[list[int]], num_ranks: int,
           part=lambda spans: spans) -> dict[str, pathlib.Path]:
    """A trace of each of `runs`, name -> step and flags, with a larger model: of REPEATS runs the shortest, or that in
    which `part` of the trace is shortest.

    What else the machine does can only lengthen a step. The runs take turns, so that it disturbs all of them alike.
    """
    model, found, steps = resized(folder, **LARGER), {name: [] for name in runs}, 3
    for k in range(REPEATS):
        for name, (step, *flags) in runs.items():
            run_slowed(groups, num_ranks, STEPS[step] / "train.py", "--model_name", model, "--log_dir", folder,
                       "--run_name", f"{name}_{k}", "--profile_batch", steps, "--max_tokens", steps * 32 * 128, *flags)
            path = folder / f"{name}_{k}" / f"timeline_batch{steps}_all.json"
            found[name].append((figures_measured.seconds_of(part(figures_measured.read_trace(path))), path))
    return {name: min(pairs)[1] for name, pairs in found.items()}


@functools.cache
def traces_of_schedules(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The schedules of steps 8, 10 and 11 on four ranks with half a core each. Five figures share them."""
    runs = {engine: [step, "--pp_size", 4, "--pp_engine", engine]
            for engine, step in (("afab", "8"), ("1f1b", "8"), ("zb", "10"))}
    runs |= {engine: ["11", "--pp_size", 4, "--virtual_stages", 2, "--pp_engine", engine]
             for engine in ("interleaved", "interleaved_zb")}
    return traces(folder, runs, [[0, 2], [1, 3]], 4)


def of_schedules(draw, engines: tuple[str, ...]):
    """A figure of some of the schedules."""
    return lambda folder, picture: draw({engine: traces_of_schedules(folder)[engine] for engine in engines}, picture)


def background(step: str, flags: list, kinds: tuple[str, ...], label: str, title: str, part=lambda spans: spans):
    """A figure of what two ranks send in the background during a step, or a part of it."""
    def draw(folder: pathlib.Path, picture: pathlib.Path) -> None:
        trace = traces(folder, {f"step{step}": [step, "--dp_size", 2, *flags]}, [], 2, part)[f"step{step}"]
        figures_measured.transfers(part(figures_measured.read_trace(trace)), kinds, picture, label, title)

    return draw


def sharded(step: str, level: int):
    """A step of two micro-batches."""
    return background(step, ["--zero", level, "--gradient_accumulation_steps", 2, "--micro_batch_size", 8],
                      ("all-gather", "reduce-scatter"), "seconds since the step's first forward began",
                      f"A step of two micro-batches with ZeRO {level}")


def unlike(folder: pathlib.Path, picture: pathlib.Path) -> None:
    """The machine that holds the whole model is three times as fast as each of the two others."""
    runs = {"unlike": ["9", "--pipelines", "8;5,3", "--num_microbatches", "6,2"]}
    figures_measured.unlike(traces(folder, runs, [[1], [2], [1, 2]], 3)["unlike"], picture)


def plan(folder: pathlib.Path, picture: pathlib.Path) -> None:
    """Three machines, one of them twice as fast: measured, and planned for."""
    model, measured, planned = resized(folder, **LARGER), folder / "cluster.json", folder / "plan.json"
    script = ROOT / "cluster" / "plan.py"
    run_slowed([[1], [2]], 3, script, "--measure", measured, "--model_name", model, "--measure_seconds", 20)
    subprocess.run([sys.executable, script, measured, "--global_batch", "32", "--out", planned], check=True,
                   stdout=subprocess.DEVNULL, env=environment())
    with modules_of(9):
        sys.path.append(str(ROOT / "cluster"))
        from planning.machines import Candidate, Cluster, Pipeline, Setting
        from planning.simulate import simulate

        cluster, chosen = Cluster(json.loads(measured.read_text())), json.loads(planned.read_text())
        pipelines = [Pipeline(tuple(p["machines"]), tuple(p["layers"]), p["num_microbatches"])
                     for p in chosen["pipelines"]]
        setting = Setting(chosen["schedule"], chosen["wire_dtype"], chosen["gradient_wire_dtype"], chosen["recompute"])
        spans = simulate(cluster, Candidate(tuple(pipelines), chosen["micro_batch_size"]), setting).spans
        whole = cluster.stages((cluster.num_layers,))[0]
        seconds = [sum(cluster.seconds(rank, 1, whole, kind) for kind in "FB") for rank in range(len(cluster.machines))]
    figures_measured.plan(seconds, chosen, spans, picture)


COURSE, BEYOND, VIRTUAL = ("afab", "1f1b"), ("1f1b", "zb"), ("1f1b", "interleaved", "interleaved_zb")
DRAWN = ("grid", "collectives", "column_row", "sequence_parallel", "ring", "axes_of_a_block")
FIGURES = {  # name -> draw(folder of runs, picture)
    **{name: lambda _, picture, draw=getattr(figures_drawn, name): draw(picture) for name in DRAWN},
    "timelines": of_schedules(figures_measured.timelines, COURSE),
    "activations": of_schedules(figures_measured.activations, COURSE),
    "zero_bubble": of_schedules(figures_measured.timelines, BEYOND),
    "virtual_stages": of_schedules(figures_measured.timelines, VIRTUAL),
    "zero_bubble_activations": of_schedules(figures_measured.activations, BEYOND),
    "zero": sharded("12", 2), "fsdp": sharded("13", 3),
    "buckets": background("6", ["--gradient_accumulation_steps", 4], ("all-reduce",),
                          "seconds since the last micro-batch's backward began", "The last micro-batch's backward",
                          figures_measured.last_backward),
    "unlike": unlike, "plan": plan,
    "muon": lambda folder, picture: figures_measured.muon(course_muon.compare(folder), picture),
}


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(FIGURES)}")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "assets", help="the folder to write to")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.names if name not in FIGURES]:
        parser.error(f"no figure {unknown[0]!r}: choose from {', '.join(FIGURES)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    with writing(args.out), tempfile.TemporaryDirectory() as folder:
        args.out.mkdir(parents=True, exist_ok=True)
        for name in args.names or FIGURES:
            picture = args.out / f"figure_{name}.png"
            FIGURES[name](pathlib.Path(folder), picture)
            print(f"{name}: {picture}", flush=True)


if __name__ == "__main__":
    main()
