"""What planning is worth, and how well it predicts: plans on three unlike hosts of the test bed, in turns.

    python tools/maintain/unlike_machines.py speeds links --json assets/unlike_machines.json   # as root: half an hour
    python tools/maintain/unlike_machines.py --plot assets/unlike_machines.png --json assets/unlike_machines.json

speeds   quotas of 100, 50 and 25 % of a core, fast links, the tiny Llama: the plan against uniform splits and against
         each machine alone
links    10 Mbit/s, equal speeds, 6 M parameters, 4096 tokens a step: the plan against data parallelism, and what
         travels in float32, bfloat16 or int8

The machines are measured first. Then the candidates are trained in turns, round by round, all in the same processes.
Each host has a copy of the folder of a case on its own disk; what a host leaves there is read.
"""

import tools_path  # noqa: F401  before launch

import argparse
import atexit
import concurrent.futures
import json
import os
import pathlib
import random
import runpy
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from launch import ROOT, Help, environment, metrics, modules_of

NODES = ("node0", "node1", "node2")
CLUSTER = ROOT / "cluster"
sys.path.append(str(CLUSTER))  # for the planner
BED = ROOT / "tools" / "testbed.sh"
PORT = 29500
CASES = {  # speeds: percent of a core; batch: samples a step; sizes: to choose from; model: changes; steps of a run
    "speeds": dict(speeds=(100, 50, 25), rate="off", batch=56, sizes="1,2,4", model={}, steps=3),
    "links": dict(speeds=(50, 50, 50), rate="10mbit", batch=32, sizes="1,2,4", steps=2,
                  model=dict(hidden_size=256, intermediate_size=688, head_dim=32)),
}

TITLES = {"speeds": "Speeds 4:2:1, fast links, 7168 tokens a step",
          "links": "10 Mbit/s, equal speeds, 4096 tokens a step"}


def bed(*args) -> None:
    subprocess.run([BED, *map(str, args)], check=True, stdin=subprocess.DEVNULL)


def on_a_disk(path: pathlib.Path) -> pathlib.Path:
    """Where this machine sees `path` of the first host that has it."""
    shown = subprocess.run([BED, "show"], check=True, text=True, stdout=subprocess.PIPE).stdout
    disks = dict(line.split("=", 1) for line in shown.splitlines())["disks"]
    return next(found for node in NODES if (found := pathlib.Path(disks, node, *path.parts[1:])).exists())


def on_all_hosts(script, *args, timeout: float) -> str:
    """torchrun of `script` over the three hosts; what the first one printed."""
    processes = []
    for rank, node in enumerate(NODES):
        # Each host stays on a core, because a quota is partly lost whenever the process moves to another one.
        core = str(min(rank, os.cpu_count() - 1))
        command = [BED, "exec", node, "taskset", "-c", core, sys.executable, "-m", "torch.distributed.run",
                   "--nnodes=3", "--nproc-per-node=1", f"--node-rank={rank}", "--master-addr=node0",
                   f"--master-port={PORT}", script, *map(str, args)]
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        processes.append(subprocess.Popen(command, env=environment(), **pipes))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        outputs = [pool.submit(process.communicate) for process in processes]
        done, _ = concurrent.futures.wait(outputs, timeout, concurrent.futures.FIRST_COMPLETED)
        for output in done:  # the first host to end
            if processes[outputs.index(output)].returncode:
                time.sleep(5)  # the others' own reports
                for process in processes:
                    process.kill()
        outputs = [output.result()[0] for output in outputs]
    assert not any(process.returncode for process in processes), "\n".join(output[-3000:] for output in outputs)
    return outputs[0]


def rank_side(folder: pathlib.Path, prepare: Callable = lambda: None) -> None:
    """On each host: the trainings of jobs.json one after the other, each with a rendezvous of its own. `prepare`: comes
    first, when cluster/ can be imported."""
    world = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    at_exit, register = [], atexit.register
    sys.path[0] = str(CLUSTER)
    prepare()

    def register_or_keep(function, *args, **kwargs):
        """Keeps what the training would do at the end of its process, which here goes on with the next job."""
        is_kept = function.__name__ == "tell_idle"
        return at_exit.append(function) if is_kept else register(function, *args, **kwargs)

    atexit.register = register_or_keep
    for job in json.loads((folder / "jobs.json").read_text()):
        flags, *others = job["flags"]
        os.environ.update(world, MASTER_PORT=str(job["port"]), TORCHELASTIC_USE_AGENT_STORE="False")
        if others:
            flags = job["flags"][int(world["RANK"])]
            os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
        sys.argv = [str(CLUSTER / "train_distributed.py"), *flags]
        try:
            runpy.run_path(sys.argv[0])["main"]()
        except SystemExit as ended:  # an idle rank
            assert not ended.code, ended.code
        while at_exit:  # tells idle ranks that the training has ended
            at_exit.pop()()
        facts = sys.modules["machine_facts"]
        facts.forget_ranks()  # the next job numbers them in another way
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # this host's own; an idle rank has none


class Bench:
    """One case: its model, measured machines, candidates, and what was measured of them."""

    def __init__(self, case: dict, folder: pathlib.Path):
        self.case, self.folder = case, folder / "case"
        self.model = self.folder / "model"
        shutil.copytree(ROOT / "assets" / "tiny_llama", self.model)
        config = json.loads((self.model / "config.json").read_text())
        (self.model / "config.json").write_text(json.dumps({**config, **self.case["model"]}))
        self.ports = iter(random.sample(range(20000, 29000), 500))
        self.candidates: dict[str, dict] = {}  # name -> plan.json

    def prepare(self) -> None:
        for node, speed in zip(NODES, self.case["speeds"]):
            bed("rate", node, self.case["rate"])
            bed("slow", node, speed)
        bed("own", self.folder)
        print(on_all_hosts(CLUSTER / "plan.py", "--measure", self.folder / "cluster.json", "--model_name", self.model,
                           "--micro_batch_size", self.case["sizes"], *self.case.get("flags", ()), timeout=300),
              flush=True)
        shutil.copy(on_a_disk(self.folder / "cluster.json"), self.folder)
        self.cluster = json.loads((self.folder / "cluster.json").read_text())

    def plan(self, *flags) -> dict:
        """What plan.py finds best."""
        out = self.folder / "plan.json"
        done = subprocess.run([sys.executable, CLUSTER / "plan.py", self.folder / "cluster.json", "--out", out,
                               "--global_batch", str(self.case["batch"]), *flags], check=True, text=True,
                              stdout=subprocess.PIPE)
        print(done.stdout, flush=True)
        return json.loads(out.read_text())

    def predict(self, size: int, *pipelines: tuple, **setting) -> dict:
        """The plan of (machines, layers, num_microbatches) each."""
        with modules_of(9):
            from planning.machines import Candidate, Cluster, Pipeline, Setting
            from planning.report import as_plan
            from planning.search import Scored
            from planning.simulate import simulate

            cluster, candidate = Cluster(self.cluster), Candidate(tuple(Pipeline(*p) for p in pipelines), size)
            setting = Setting(**setting)
            return as_plan(cluster, Scored(candidate, simulate(cluster, candidate, setting)), setting)

    def by_plan(self, name: str, plan: dict) -> list:
        """The flags of a training by this plan."""
        (self.folder / f"{name}.json").write_text(json.dumps(plan))
        return ["--plan", self.folder / f"{name}.json"]

    def train(self, script: str, runs: list[tuple[str, list]]) -> str:
        """Trains each of (name, flags) in turn; what the first host printed. `script`: what calls rank_side().

        Where there are flags for each host, all of them train at the same time, each by itself; their runs are name_0,
        name_1 and name_2.
        """
        folders = ["--log_dir", self.folder / "runs", "--checkpoint_dir", self.folder / "checkpoints"]
        common = ["--model_name", self.model, *folders, *self.case.get("flags", ())]
        jobs = []
        for name, flags in runs:
            runs_at_once = {f"{name}_{k}": own for k, own in enumerate(flags)} if type(flags[0]) is list else {name: flags}
            jobs.append({"port": next(self.ports), "flags": [[*map(str, (*common, *own, "--run_name", run))]
                                                             for run, own in runs_at_once.items()]})
        (self.folder / "jobs.json").write_text(json.dumps(jobs))
        bed("own", self.folder)
        return on_all_hosts(script, "--rank_side", self.folder, timeout=3000)

    def run(self, rounds: int) -> dict:
        """All candidates, round by round. Step seconds of each; the first step of a run does not count."""
        seconds, losses = {name: [] for name in self.candidates}, {}
        flags = {name: [*self.by_plan(name, plan), "--max_steps", self.case["steps"], "--replan", "off"]
                 for name, plan in self.candidates.items()}
        self.train(__file__, [(f"{name}_{k}", flags[name]) for k in range(rounds) for name in flags])
        for name in self.candidates:
            for k in range(rounds):
                rows = metrics(on_a_disk(self.folder / "runs" / f"{name}_{k}").parent, f"{name}_{k}")
                seconds[name] += [row["step_seconds"] for row in rows[1:]]
                losses[name] = [row["loss"] for row in rows]
        return {"cluster": self.cluster, "losses": losses, "candidates": {
            name: {"plan": plan, "predicted": plan["predicted"]["step_seconds"], "measured": seconds[name]}
            for name, plan in self.candidates.items()}}


def candidates_of_speeds(bench: Bench) -> None:
    layers, batch, add = 8, CASES["speeds"]["batch"], bench.candidates
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


def candidates_of_links(bench: Bench) -> None:
    add = bench.candidates
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


def measure(args, results: dict) -> None:
    bed("up")
    try:
        for name in args.cases:
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(CASES[name], pathlib.Path(folder))
                bench.prepare()
                (candidates_of_speeds if name == "speeds" else candidates_of_links)(bench)
                results[name] = bench.run(args.rounds)
            args.json.write_text(json.dumps(results, indent=1))
            table(name, results[name])
    finally:
        bed("down")


def table(name: str, result: dict) -> None:
    rows = sorted((statistics.median(found["measured"]), key, found) for key, found in result["candidates"].items())
    print(f"{name:24} measured s (smallest - largest), predicted, measured / predicted, loss of the first step")
    for seconds, key, found in rows:
        spread = f"{min(found['measured']):.3f} - {max(found['measured']):.3f}"
        expected = found["predicted"]
        print(f"{key:24} {seconds:8.3f} ({spread:>15})  {expected:8.3f}  {seconds / expected:8.2f}  "
              f"{result['losses'][key][0]:.6f}", flush=True)


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
    parser.add_argument("cases", nargs="*", help=f"to measure: {', '.join(CASES)}")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "runs" / "unlike_machines.json",
                        help="what was measured")
    parser.add_argument("--rounds", type=int, default=3, help="each candidate trains so often")
    parser.add_argument("--plot", help="draw what --json holds")
    args = parser.parse_args()
    results = json.loads(args.json.read_text()) if args.json.exists() else {}
    if args.cases:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        measure(args, results)
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    rank_side(pathlib.Path(sys.argv[2])) if sys.argv[1:2] == ["--rank_side"] else main()
