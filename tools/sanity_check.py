"""Every topology of steps 3 to 16 on the same samples: are its loss and gradient norm those of one process?

    python tools/sanity_check.py                                     # the tiny Llama, 50 steps, minutes on two cores
    python tools/sanity_check.py --dtype float64 --steps 20
    python tools/sanity_check.py --preset 1b                         # TinyLlama's shape, for a machine with GPUs
    python tools/sanity_check.py --preset 1b --rows tp4 --max_tokens 409600     # beside an earlier baseline
    python tools/sanity_check.py --preset 1b --dtype float32 --device cpu --seq_len 32 --steps 4 \
        --rows baseline tp4 pp4_1f1b tp2pp2                          # without a GPU: an hour on two cores, 23 GB
    python tools/sanity_check.py --plot runs/baseline runs/tp4       # trains nothing; the first run is the baseline

Trains one row after the other, prints a table and draws a figure. Exits with 1 where a row can't run, has read other
samples, or is further from the baseline than TOLERANCE allows. Losses are compared by their difference, gradient norms
(before clipping) by their relative difference. Rounding grows from step to step, since each step starts from the
weights of the one before: float64 is judged over all steps, the others over the first 20, and bfloat16's norms over 5.
The furthest rows of the tiny Llama were 6e-14 (loss) and 7e-13 (norm) away in float64, and 4e-5 and 4e-4 in float32.
In bfloat16 TP 4's loss was 4e-2 away, its norm 1e-2 in the first 5 steps and 0.2 later, at single steps.
The limits for norms thus have a margin of 5 at least. The 1b preset in float32 has its own, PRESET_TOLERANCE.
A choice of --rows without the baseline is compared with the baseline that an earlier call left in --log_dir.
"""

import argparse
import collections
import dataclasses
import importlib.util
import json
import math
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from typing import NamedTuple

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from course.sanity_figure import draw
from lab.launch import ROOT, STEPS, Help, metrics, torchrun, writing
from lab.program import Program

QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}  # in metrics.jsonl, and in words
TINYLLAMA = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32, head_dim=64,
                 num_key_value_heads=4, vocab_size=32000, initializer_range=0.02)
# seq_len, tokens to train on, learning rate, steps in which it rises, dtype. Without them the loss of the 1b preset
# jumps in its first steps (gradient norm 489), where a difference in the last digit soon is one in the first.
PRESETS = {"tiny": (128, 204_800, 3e-3, 0, "float32"), "1b": (1024, 4_096_000, 3e-4, 20, "bfloat16")}
# An optimizer step reads 32 samples: micro_batch_size * ACCUMULATION * dp_size. Rows with data parallelism take smaller
# micro-batches, not fewer: each row accumulates gradients, and fills a pipeline of 4 stages.
GLOBAL_BATCH, ACCUMULATION = 32, 8


class Limit(NamedTuple):
    """The largest difference that passes, and the number of first steps that are judged by it (None: all)."""
    largest: float
    steps: int | None = None

    @property
    def words(self) -> str:
        text = f"{self.largest:.0e}".replace("e-0", "e-")
        return f"{text} over the first {self.steps} steps" if self.steps else f"{text} over all steps"


TOLERANCE = {  # dtype -> quantity of metrics.jsonl -> limit
    "float64": {"loss": Limit(1e-11), "grad_norm": Limit(1e-11)},
    "float32": {"loss": Limit(1e-4, 20), "grad_norm": Limit(2e-3, 20)},
    "bfloat16": {"loss": Limit(5e-2, 20), "grad_norm": Limit(5e-2, 5)},
}
# A preset's own. In float32 both are 1e-4 of the value, of a loss of 5 or more. In bfloat16 the furthest rows were 6e-2
# (loss of TP 4) and 7e-3 (norm) away.
PRESET_TOLERANCE = {("1b", "float32"): {"loss": Limit(5e-4, 20), "grad_norm": Limit(1e-4, 20)},
                    ("1b", "bfloat16"): {"loss": Limit(1e-1, 20), "grad_norm": Limit(5e-2, 5)}}

Row = collections.namedtuple("Row", "name label step flags")  # name: on the command line, and the run's in --log_dir
ROWS = {row.name: row for row in [
    Row("baseline", "Baseline", 3, {}),
    Row("tp4", "TP 4", 4, {"tp_size": 4}),
    Row("tp2", "TP 2", 4, {"tp_size": 2}),
    Row("dp4_naive", "Naive DP 4", 5, {"dp_size": 4}),
    Row("dp4_bucket", "Bucket DP 4", 6, {"dp_size": 4}),
    Row("pp4_afab", "PP 4 AFAB", 7, {"pp_size": 4}),
    Row("pp4_1f1b", "PP 4 1F1B", 8, {"pp_size": 4, "pp_engine": "1f1b"}),
    Row("pp4_zb", "PP 4 ZB", 10, {"pp_size": 4, "pp_engine": "zb"}),
    Row("tp2pp2", "TP 2 x PP 2", 8, {"pp_size": 2, "tp_size": 2, "pp_engine": "1f1b"}),
    Row("3d", "3D 2x2x2", 8, {"dp_size": 2, "pp_size": 2, "tp_size": 2, "pp_engine": "1f1b"}),
    Row("unlike", "Unlike 8;5,3", 9, {"pipelines": "8;5,3", "num_microbatches": "5,3"}),
    Row("pp4_interleaved", "PP 4 x 2", 11, {"pp_size": 4, "pp_engine": "interleaved", "virtual_stages": 2}),
    Row("pp4_interleaved_zb", "PP 4 x 2 ZB", 11, {"pp_size": 4, "pp_engine": "interleaved_zb", "virtual_stages": 2}),
    Row("dp4_zero2", "ZeRO 2", 12, {"dp_size": 4, "zero": 2}),
    Row("dp4_fsdp", "FSDP", 13, {"dp_size": 4, "zero": 3}),
    Row("tp4_sequence", "TP 4 SP", 14, {"tp_size": 4, "sequence_parallel": True}),
]}
DEFAULT_ROWS = [name for name, row in ROWS.items() if row.step < 11 and name != "tp2pp2"]  # 3d contains it


@dataclasses.dataclass
class Run:
    folder: pathlib.Path
    label: str
    config: dict
    values: dict[str, list[float]]  # of "loss" and "grad_norm"
    tokens_per_step: int
    tokens_per_second: float  # the median, without the first step, which warms up

    @classmethod
    def read(cls, folder: pathlib.Path) -> "Run":
        """Raises ValueError where the folder holds no run."""
        try:
            config, rows = json.loads((folder / "config.json").read_text()), metrics(folder.parent, folder.name)
        except (OSError, json.JSONDecodeError) as error:
            raise ValueError(f"{folder} holds no run: {error}") from None
        values = {key: [row[key] for row in rows] for key in QUANTITIES}
        if not rows or not all(math.isfinite(value) for column in values.values() for value in column):
            raise ValueError(f"{folder} holds a run without a step, or with a loss or gradient norm that is no number")
        label = ROWS[folder.name].label if folder.name in ROWS else folder.name
        speeds = [row["tokens_per_second"] for row in rows[1:] or rows]
        return cls(folder, label, config, values, rows[0]["trained_tokens"] // rows[0]["step"],
                   statistics.median(speeds))

    @property
    def recipe(self) -> dict:
        """What must be the same for two runs to be comparable."""
        keys = ("model_name", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "dataset_name", "seed",
                "learning_rate", "seq_len", "dtype", "max_grad_norm", "warmup_steps", "lr_decay")
        return {"number of tokens a step": self.tokens_per_step, **{key: self.config[key] for key in keys}}

    def gaps(self, baseline: "Run", key: str = "loss") -> list[float]:
        """What parts this run from the baseline at each step that both have: |difference|, relative for grad_norm."""
        pairs = zip(self.values[key], baseline.values[key])
        return [abs(a - b) / (b if key == "grad_norm" else 1) for a, b in pairs]

    def worst(self, baseline: "Run", steps: int | None, key: str = "loss") -> float:
        return max(self.gaps(baseline, key)[:steps])


def failures(runs: list[Run], dtype: str, tolerance: dict[str, Limit]) -> list[str]:
    """What makes the check fail, a line each; the first run is the baseline."""
    baseline, found = runs[0], []
    for run in runs[1:]:
        for key, value in run.recipe.items():
            if value != (expected := baseline.recipe[key]):
                found.append(f"{run.label} can't be compared: its {key} is {value}, the baseline's {expected}")
        for key, limit in tolerance.items():
            if not (worst := run.worst(baseline, limit.steps, key)) <= limit.largest:
                found.append(f"{run.label}: its {QUANTITIES[key]} is {worst:.1e} away from the baseline's; "
                             f"{dtype} allows {limit.words}")
    return found


def table(runs: list[Run], judged: int | None) -> str:
    """Markdown, in columns that line up. Gradient norms have a column for their `judged` steps."""
    baseline, columns = runs[0], [("loss", 20), ("loss", None), ("grad_norm", judged)]
    lines = [["run", "ranks", "steps", "final loss", "max difference, first 20 steps", "all steps",
              f"gradient norm, relative, {f'first {judged}' if judged else 'all'} steps", "tokens/s"]]
    for run in runs:
        gaps = [None if run is baseline else run.worst(baseline, steps, key) for key, steps in columns]
        losses, ranks = run.values["loss"], run.config["topology"]["world_size"]
        lines.append([run.label, str(ranks), str(len(losses)), f"{losses[-1]:.4f}",
                      *("" if gap is None else f"{gap:.1e}" for gap in gaps), f"{run.tokens_per_second:,.0f}"])
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    lines = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def make_1b_model(folder: pathlib.Path) -> pathlib.Path:
    """The shape of TinyLlama 1.1B with the embedded tokenizer, whose 1024 ids fit its larger vocabulary."""
    embedded, config = ROOT / "assets" / "tiny_llama", folder / "config.json"
    shutil.copytree(embedded, folder, dirs_exist_ok=True)
    config.write_text(json.dumps({**json.loads(config.read_text()), **TINYLLAMA}, indent=2))
    shutil.copystat(embedded / "config.json", config)  # the cache of tokens goes by a file's time
    return folder


def train(row: Row, flags: dict, log_dir: pathlib.Path) -> bool:
    """Runs one row, its output in <log_dir>/<name>.log; False, and the output's end printed, where it fails."""
    flags = {"micro_batch_size": GLOBAL_BATCH // ACCUMULATION // row.flags.get("dp_size", 1), "run_name": row.name,
             "gradient_accumulation_steps": ACCUMULATION, "log_dir": log_dir, **flags, **row.flags}
    words = [word for name, value in flags.items() for word in (f"--{name}", value) if word is not True]
    ranks, output = Program(row.step, words).size, log_dir / f"{row.name}.log"
    environment = {**({"OMP_NUM_THREADS": "1"} if ranks > 1 else {}), **os.environ}
    log_dir.mkdir(parents=True, exist_ok=True)
    (log_dir / row.name / "metrics.jsonl").unlink(missing_ok=True)  # else a failure would leave an earlier run's
    print(f"{row.label}: {ranks} rank(s), output in {output} ... ", end="", flush=True)
    start = time.perf_counter()
    with open(output, "w") as file:
        done = subprocess.run(torchrun(ranks, STEPS[str(row.step)] / "train.py", *words), env=environment, stdout=file,
                              stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    end = f", FAILED with exit code {done.returncode}:\n{output.read_text()[-3000:]}" if done.returncode else ""
    print(f"{time.perf_counter() - start:.0f} s{end}", flush=True)
    return done.returncode == 0


def has_bfloat16(device: str) -> bool:
    """Whether the GPU that runs are on multiplies bfloat16 in hardware. On a CPU no other format is quicker: True."""
    import torch

    is_gpu = device != "cpu" and torch.cuda.is_available()
    return not is_gpu or torch.cuda.is_bf16_supported(including_emulation=False)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="with --plot: whose tolerance applies")
    parser.add_argument("--dtype", choices=TOLERANCE, help="float32; 1b: bfloat16; --plot: what an auto was")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="to compute on")
    parser.add_argument("--seq_len", type=int, metavar="N", help="tokens in a sample, instead of the preset's")
    parser.add_argument("--max_grad_norm", type=float, help="clip gradients (default: as train.py does; 0: never)")
    parser.add_argument("--steps", type=int, help="optimizer steps, instead of --max_tokens")
    parser.add_argument("--max_tokens", type=int, help="to train on, instead of the preset's")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=DEFAULT_ROWS, metavar="ROW",
                        help=f"train these only, of {', '.join(ROWS)} (default: all but tp2pp2)")
    parser.add_argument("--use_wandb", action="store_true", help="record the runs in Weights & Biases, in one group")
    parser.add_argument("--wandb_group", metavar="NAME", default="sanity_check", help="of these runs")
    parser.add_argument("--log_dir", type=pathlib.Path, default=ROOT / "runs" / "sanity_check", help="of the runs")
    parser.add_argument("--figure", type=pathlib.Path,
                        help="default: sanity_check.png in --log_dir; with --plot: compared.png beside the runs")
    parser.add_argument("--plot", nargs="+", type=pathlib.Path, metavar="RUN_DIR", help="draw these, train nothing")
    args = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("the figure needs matplotlib: pip install -e '.[test]'")
    if not (args.plot or "baseline" in args.rows or (args.log_dir / "baseline" / "metrics.jsonl").exists()):
        parser.error(f"{args.log_dir} holds no baseline to compare with: add it to --rows")
    if args.steps is not None and args.max_tokens is not None:
        parser.error("--steps and --max_tokens say the same thing: use one of them")
    seq_len, budget, *_ = PRESETS[args.preset]
    args.seq_len = args.seq_len or seq_len
    if args.max_tokens is None:
        args.max_tokens = budget if args.steps is None else args.steps * GLOBAL_BATCH * args.seq_len
    args.log_dir = args.log_dir.resolve()
    args.figure = args.figure or (
        args.plot[0].resolve().parent / "compared.png" if args.plot else args.log_dir / "sanity_check.png")
    return args


def main() -> int:
    args = parse_args()
    failed, folders, runs = [], [folder.resolve() for folder in args.plot or []], []
    if not args.plot:
        _, _, rate, warm_up, dtype = PRESETS[args.preset]
        if dtype == "bfloat16" and not args.dtype and not has_bfloat16(args.device):
            print("this GPU has no bfloat16 in hardware: the preset's dtype is float32 here", flush=True)
            dtype = "float32"
        flags = {"seq_len": args.seq_len, "learning_rate": rate, "warmup_steps": warm_up, "dtype": args.dtype or dtype,
                 "device": args.device, "max_tokens": args.max_tokens}
        if args.max_grad_norm is not None:
            flags["max_grad_norm"] = args.max_grad_norm
        if args.use_wandb:
            flags.update(use_wandb=True, wandb_group=args.wandb_group)
        folders = [args.log_dir / "baseline"]
        with writing(args.log_dir):
            if args.preset == "1b":
                flags["model_name"] = make_1b_model(args.log_dir / "tinyllama_1b")
            for name in sorted(args.rows, key=list(ROWS).index):  # the baseline first
                if train(ROWS[name], flags, args.log_dir):
                    folders.append(args.log_dir / name)
                else:
                    failed.append(f"{ROWS[name].label} did not run")
    for folder in dict.fromkeys(folders):
        try:
            runs.append(Run.read(folder))
        except ValueError as error:
            failed.append(str(error))
    if runs and runs[0].folder == folders[0]:  # without the baseline there is nothing to compare
        if (dtype := runs[0].config["dtype"]) == "auto":
            print(f"a dtype of auto is taken for {(dtype := args.dtype or 'float32')}: --dtype says otherwise")
        tolerance = PRESET_TOLERANCE.get((args.preset, dtype), TOLERANCE[dtype])
        print(table(runs, tolerance["grad_norm"].steps))
        failed += failures(runs, dtype, tolerance)
        if len(runs) > 1:
            draw(runs, args.figure, dtype, tolerance)
            words = ", ".join(f"{QUANTITIES[key]} {tolerance[key].words}" for key in QUANTITIES)
            print(f"figure: {args.figure}\ntolerance of {dtype}: {words}")
    print("\n".join(failed) or "no run is further from the baseline")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
