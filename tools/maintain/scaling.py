"""Scaling, as a figure: step time and peak memory of a rank as sizes grow, measured, beside what theory says.

    python tools/maintain/scaling.py --plot assets/scaling.png --json runs/scaling.json   # on Linux

Runs step 8's train.py, unchanged, one quantity varied at a time. A time is the median over the steps of several rounds
of all cases, without a run's first step and its last, whose timeline is written. Memory is counted in one more round,
untimed: of what is saved for backward each storage counts once, parameters never. Cases of equally many ranks share a
torchrun of tools/maintain/scaling_rank.py, which runs train.py for each.

Theory is fair to the machine: a stage takes as long as its layers' FLOPs, and no more ranks compute at once than there
are cores. With a core for each of p stages, all alike, the bubble is then the textbook's (p-1)/(m+p-1).
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import pathlib
import re
import statistics
import tempfile
from typing import NamedTuple

from launch import CORES, ROOT, launch, metrics, modules_of

CONFIG = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text())
HIDDEN, WIDTH, VOCABULARY = (CONFIG[f"{name}_size"] for name in ("hidden", "intermediate", "vocab"))
HEADS, KV_HEADS, HEAD_DIM = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["head_dim"]
MICRO_BATCH, FLOAT = 2, 4  # samples, bytes


class Case(NamedTuple):
    """One run: stages, tensor-parallel ranks, schedule, micro-batches a step, tokens a sample, layers."""
    pp: int = 1
    tp: int = 1
    engine: str = "1f1b"
    m: int = 4
    seq_len: int = 128
    layers: int = 8

    @property
    def name(self) -> str:
        return "pp{}_tp{}_{}_m{}_t{}_l{}".format(*self)

    def flags(self, log_dir: str, steps: int) -> list[str]:
        flags = dict(pp_size=self.pp, tp_size=self.tp, pp_engine=self.engine, gradient_accumulation_steps=self.m,
                     seq_len=self.seq_len, num_hidden_layers=self.layers, micro_batch_size=MICRO_BATCH, log_dir=log_dir,
                     max_tokens=steps * MICRO_BATCH * self.m * self.seq_len, run_name=self.name,
                     profile_batch=steps if self.pp > 1 else 0)
        return [str(word) for name, value in flags.items() for word in (f"--{name}", value)]

    def live_microbatches(self, stage: int) -> int:
        return self.m if self.engine == "afab" else min(self.m, self.pp - stage)

    def num_layers(self, stage: int) -> int:
        return self.layers // self.pp + (stage < self.layers % self.pp)

    def weights(self, stage: int) -> int:
        """Weights that a token is multiplied by on this stage, on all its tp ranks together."""
        layer = 2 * HIDDEN * HEAD_DIM * (HEADS + KV_HEADS) + 3 * HIDDEN * WIDTH
        return self.num_layers(stage) * layer + (HIDDEN * VOCABULARY if stage == self.pp - 1 else 0)

    def flops(self, stage: int) -> int:
        """A micro-batch's forward: a token takes 2 a weight, and 2 T a channel in causal attention."""
        a_token = 2 * self.weights(stage) + 2 * self.seq_len * HEADS * HEAD_DIM * self.num_layers(stage)
        return a_token * MICRO_BATCH * self.seq_len

    def state_bytes(self) -> float:
        """1/(pp tp) of all parameters, their gradients and AdamW's two moments."""
        parameters = self._replace(pp=1).weights(0) + HIDDEN * (VOCABULARY + 2 * self.layers + 1)
        return 4 * FLOAT * parameters / (self.pp * self.tp)

    def saved_bytes(self, stage: int) -> float:
        """What a rank saves for backward at most: live micro-batches x tokens x numbers, all of what a layer makes."""
        norm = 3 * HIDDEN + 1  # input, 1/rms, normalized, scaled
        split = 2 * HEAD_DIM * (HEADS + KV_HEADS) + HEADS + 4 * WIDTH  # q, out, k, v, logs; gate, silu, up, product
        numbers = self.num_layers(stage) * (2 * norm + split / self.tp)
        numbers += norm + VOCABULARY / self.tp if stage == self.pp - 1 else 0  # softmax
        return self.live_microbatches(stage) * MICRO_BATCH * self.seq_len * numbers * FLOAT

    def simulate(self, cores: int = CORES) -> tuple[float, float]:
        """A step's time, in FLOPs of one core, and its bubble; stages share the cores evenly, transfers are free."""
        with modules_of(8):
            import pipeline_parallel
        schedule = pipeline_parallel.afab if self.engine == "afab" else pipeline_parallel.one_f_one_b
        todo = [list(schedule(stage, self.pp, self.m))[::-1] for stage in range(self.pp)]
        done, left, clock, busy = set(), {}, 0.0, 0.0  # left: stage -> work left of the action it is at
        while any(todo):
            for stage, actions in enumerate(todo):
                if actions and stage not in left:
                    kind, i = actions[-1]
                    needs = (stage - 1 if kind == "F" else stage + 1, kind, i)
                    if needs in done or not 0 <= needs[0] < self.pp:
                        left[stage] = self.flops(stage) * (1 if kind == "F" else 2) / self.tp
            work = min(left.values())
            elapsed = work / min(1.0, cores / (len(left) * self.tp))
            clock, busy = clock + elapsed, busy + elapsed * len(left)  # busy, however slowly: so a timeline shows it
            left = {stage: rest - work for stage, rest in left.items()}
            for stage in [stage for stage, rest in left.items() if rest < 1]:
                del left[stage]
                done.add((stage, *todo[stage].pop()))
        return clock, 1 - busy / (clock * self.pp)


def bubble(p: int, m: int) -> float:
    """The textbook's: p stages alike, a processor each, transfers free."""
    return (p - 1) / (m + p - 1)


COUNTS = (1, 2, 4, 8, 16)
SWEEPS = {  # each varies one quantity
    "m": [Case(pp=p, engine=engine, m=m) for p in (2, 4) for m in COUNTS for engine in ("afab", "1f1b")],
    "pp": [Case(pp=p, m=8) for p in (1, 2, 4)], "tp": [Case(tp=t) for t in (1, 2, 4)],
    "seq_len": [Case(seq_len=t) for t in (64, 128, 256, 512)],
    "layers": [Case(layers=n) for n in (2, 4, 8, 16)],
}
GRIDS = [Case(pp=p, tp=t) for p, t in ((1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (4, 2))]  # for memory alone
LABELS = {  # panel -> title, x
    "bubble": ("Bubble (% of the ranks' time)", "micro-batches m"), "m": ("Step time / m (ms)", "micro-batches m"),
    "live": ("Micro-batches alive, peak", "micro-batches m"), "saved": ("Saved for backward (MB)", "micro-batches m"),
    "pp": ("Step time (ms), m = 8", "stages, 1F1B"), "tp": ("Step time (ms), m = 4", "tensor-parallel ranks"),
    "seq_len": ("Step time (ms)", "tokens, one rank"), "layers": ("Step time (ms)", "layers, one rank"),
    "state": ("Peak memory of the fullest rank (MB), 1F1B, m = 4", "stages x tensor-parallel ranks"),
    "seq_len MB": ("Peak memory (MB)", "tokens, one rank"), "layers MB": ("Peak memory (MB)", "layers, one rank"),
}


def parse_bubbles(output: str) -> dict[str, float]:
    """Of each run, by name, the share that train.py printed."""
    found = re.findall(r"timeline: .*/(.+)/timeline_\S+\s+bubble: ([\d.]+)% measured", output)
    return {name: float(percent) / 100 for name, percent in found}


def train(cases: list[Case], folder: pathlib.Path, counting: bool, results: dict) -> None:
    """Runs cases with equally many ranks in one torchrun and adds what they leave to `results`, by name."""
    import torch.distributed as dist

    ranks, steps = cases[0].pp * cases[0].tp, 2 if counting else 5
    runs, stores = [], []
    for case in cases[:1] + cases:  # one twice: in a process's first run torch loads what it loads late
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # where the ranks of a run meet
        stores.append(store)
        runs.append(dict(name=case.name, port=store.port, counting=counting, flags=case.flags(str(folder), steps)))
    (folder / "runs.json").write_text(json.dumps(runs))
    print(f"{len(cases)} cases on {ranks} ranks", flush=True)
    script = ROOT / "tools" / "maintain" / "scaling_rank.py"
    bubbles = parse_bubbles(launch(None, ranks, folder, script=script, timeout=300).stdout)
    for case in cases:
        result = results.setdefault(case.name, {"case": case._asdict(), "step_seconds": [], "bubble": []})
        if counting:
            result["ranks"] = [json.loads((folder / f"{case.name}_{rank}.json").read_text()) for rank in range(ranks)]
        else:
            result["step_seconds"] += [row["step_seconds"] for row in metrics(folder, case.name)[1:-1]]
            result["bubble"] += [bubbles[case.name]] if case.pp > 1 else []


def measure(rounds: int, results: dict) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        for counting in [False] * rounds + [True]:
            cases = list(dict.fromkeys(sum(SWEEPS.values(), GRIDS * counting)))
            for ranks in sorted({case.pp * case.tp for case in cases}):
                train([case for case in cases if case.pp * case.tp == ranks], pathlib.Path(folder), counting, results)
    return results


def show(axes, xs, cases: list[Case], measured, theory, index: int, label: str) -> None:
    """Points, and the line that theory draws through them; both functions of a case."""
    axes.plot(xs, list(map(measured, cases)), "osD^vP"[index], color=f"C{index % 4}", label=label, fillstyle="none")
    axes.plot(xs, list(map(theory, cases)), color=f"C{index % 4}", linewidth=1.2)


def draw(results: dict, picture: str) -> None:
    """All of theory's times follow from one measured time, that of Case()."""
    from matplotlib.figure import Figure

    def ms(case: Case) -> float:
        return 1e3 * statistics.median(results[case.name]["step_seconds"])

    def predicted(case: Case, cores: int = CORES) -> float:
        return ms(Case()) * case.simulate(cores)[0] / Case().simulate()[0]

    def most(case: Case, *keys: str) -> float:
        return max(sum(rank[key] for key in keys) for rank in results[case.name]["ranks"]) / 1e6

    figure = Figure(figsize=(18, 12.5), dpi=85, layout="constrained")
    panels = figure.subplot_mosaic([["bubble", "m", "live", "saved"], ["pp", "tp", "seq_len", "layers"],
                                    ["state", "state", "seq_len MB", "layers MB"]])
    for k, (p, engine) in enumerate([(2, "afab"), (4, "afab"), (2, "1f1b"), (4, "1f1b")]):
        run, label = (COUNTS, [Case(p, 1, engine, m) for m in COUNTS]), f"{p} stages, {engine.upper()}"
        show(panels["bubble"], *run, lambda case: 100 * statistics.median(results[case.name]["bubble"]),
             lambda case: 100 * case.simulate()[1], k, label)
        show(panels["m"], *run, lambda case: ms(case) / case.m, lambda case: predicted(case) / case.m, k, label)
        panels["bubble"].plot(COUNTS, [100 * bubble(p, m) for m in COUNTS], ":", color=f"C{k}")
    for k, (engine, s) in enumerate([*(("1f1b", s) for s in range(4)), ("afab", 0), ("afab", 3)]):
        cases, label = [Case(pp=4, engine=engine, m=m) for m in COUNTS], f"{engine.upper()}, stage {s} of 0 to 3"
        for name, theory, unit in (("live", Case.live_microbatches, 1), ("saved", Case.saved_bytes, 1e6)):
            show(panels[name], COUNTS, cases, lambda case: results[case.name]["ranks"][s][name] / unit,
                 lambda case: theory(case, s) / unit, k, label)
    for key in ("pp", "tp", "seq_len", "layers"):
        xs = [getattr(case, key) for case in SWEEPS[key]]
        show(panels[key], xs, SWEEPS[key], ms, predicted, 0, "measured")
        panels[key].plot(xs, [predicted(case, 99) for case in SWEEPS[key]], ":", color="C0")
    for name, cases in (("state", GRIDS), ("seq_len MB", SWEEPS["seq_len"]), ("layers MB", SWEEPS["layers"])):
        xs = [f"{case.pp} x {case.tp}" if cases is GRIDS else getattr(case, name[:-3]) for case in cases]
        show(panels[name], xs, cases, lambda case: most(case, "state"), lambda case: case.state_bytes() / 1e6, 0,
             "parameters, gradients, moments")
        show(panels[name], xs, cases, lambda case: most(case, "state", "saved"), lambda case: (
            case.state_bytes() + max(case.saved_bytes(s) for s in range(case.pp))) / 1e6, 1, "and saved for backward")
        panels[name].plot(xs, [most(case, "resident") for case in cases], "x", color="grey", label="resident")
    for name, (title, x) in LABELS.items():
        (axes := panels[name]).set_title(title, loc="left", fontsize=12, weight="bold")
        axes.set(xlabel=x, ylim=(0, axes.get_ylim()[1] * (1.2 if name in ("m", "bubble") else 1)))
        if name != "state":
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks := list(axes.lines[0].get_xdata()), map(str, ticks))
        axes.grid(color="#e4e4e4", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9.5)
    figure.suptitle(f"Points: measured. Lines: theory for {CORES} cores. Dotted: for a core a rank; of the bubble, for "
                    "stages all alike, (p-1)/(m+p-1)", x=0.01, ha="left", fontsize=14)
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", default=ROOT / "runs" / "scaling.png", help="the figure (default: %(default)s)")
    parser.add_argument("--json", type=pathlib.Path, default=ROOT / "runs" / "scaling.json", help="what was measured")
    parser.add_argument("--redraw", action="store_true", help="draw what --json holds, measure nothing")
    parser.add_argument("--rounds", type=int, default=3, help="with 3 timed steps of each case")
    args = parser.parse_args()
    if not args.redraw:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(measure(args.rounds, {}), indent=1))
    draw(json.loads(args.json.read_text()), args.plot)


if __name__ == "__main__":
    main()
