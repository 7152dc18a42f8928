"""python tools/museum/published_faults.py [KIND ...]: of each published fault, what a loss curve says and what the
verdict of same_numbers says, as a table in Markdown; docs/SAME_NUMBERS.md shows it.

The faults are switches of same_numbers/trainers_model.py and trainers_data.py. The ranks of a number and dtype are
forked once, and train one after the other.
"""

import argparse
import datetime
import json
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))
from same_numbers import compare, trainers_data, trainers_model  # noqa: E402
from same_numbers.trainers_base import Run, faults, rank  # noqa: E402

ALL = r"\ball \d"
SUM = "whose sum is right.*is the sum over tp ranks left out"
MEAN = "whose mean is right: are some summands never averaged"
EXPECTED = {  # kind and fault: of what the verdict's first line has to speak, and by which words it names the cause
    "tp head_norms": ("[qk]_norm", SUM), "tp gathered": ("loss", "log|forward is right|vocabulary"),
    "tp mask": ("embedding: |embedding,", "first wrong in forward"),
    "tp bias": (r"layers.0(.mlp)?\b", "first wrong in forward"),
    "tp bias_mean": ("down.bias", "times too small"), "tp f": ("norm.weight: ", SUM),
    "tp g": ("mlp.down.weight|layers.1", "one sum too many"), "tp counted": ("gradient norm", "counted once for each"),
    "tp own_norm": ("gradient norm", "of its own"), "sp norms": (r"norm\*?.weight", SUM), "sp router": ("router", SUM),
    "cp labels": ("loss", "targets"), "cp positions": ("layers.0", "first wrong in forward"),
    "cp scale": (ALL, "too large.*sum over ranks"),
    "cp ring": ("[kv]_norm|layers", "look at backward|first wrong"),
    "pp twice": ("layers.0", "first wrong in forward.*twice"), "pp never": ("layers.1", "absent|no rank"),
    "pp tied": ("embedding", "tied"), "pp scale": (ALL, "number of.*micro-batches.*: is the loss divided"),
    "pp own_norm": (f"{ALL}|gradient norm", "its own"), "ep times": ("mlp.up", "too large.*sum over ranks"),
    "ep group": ("mlp.up", "group|other experts|mixed"), "ep balance": ("loss", "forward is right|balanc"),
    "ep own_norm": ("gradient norm", "of its own"), "ddp flag": (ALL, MEAN), "replicas hook": (ALL, MEAN),
    "replicas stale": ("embedding", MEAN), "replicas undivided": (ALL, "too large = the number of.*micro-batches"),
    "replicas sum": (ALL, "too large.*a sum over ranks where the mean"), "replicas seeds": ("at the start", "seed"),
    "replicas samples": ("samples", "does the loader ask"), "replicas rate": ("settings", "learning rate.*scheduler"),
    "replicas recompute": ("layers.0", "look at backward|first wrong"),
    "padded own_count": (ALL, "count .* times.*padding"), "padded averaged": (ALL, "too small.*divided by ranks"),
    "contrastive own_samples": ("loss", "forward is right|negatives|other samples"),
    "contrastive no_grad": (ALL, "look at backward|first wrong"),
    "sharded early": ("changed", "does not hold 16 of them: was it made before"),
    "sharded shard": ("changed", "drift|never sent|broadcast"), "sharded own_norm": (f"{ALL}|gradient norm", "its own"),
    "muon rows": ("changed", "whole matri|Muon|shards"), "resumed moments": ("changed", "moments"),
    "resumed data": ("samples", "does a resumed run begin its data anew"), "local sign": ("changed", "sign"),
}
TRAINERS = trainers_model.TRAINERS | trainers_data.TRAINERS
CASES = [(kind, fault) for kind, trainer in TRAINERS.items() for fault in ("", *faults(trainer))]


class Verdict(NamedTuple):
    lines: list[str]  # none where the numbers are the same
    placed: bool = False
    named: bool = False


def folder_of(folder, kind: str, fault: str, ranks: int, dtype: torch.dtype) -> pathlib.Path:
    return pathlib.Path(folder, f"{kind}_{fault or 'right'}_{ranks}_{str(dtype)[6:]}")


def run_rank(number: int, ranks: int, dtype: torch.dtype, cases: list, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    if ranks > 1:
        dist.init_process_group("gloo", f"file://{folder}/store{ranks}{dtype}", rank=number, world_size=ranks,
                                timeout=datetime.timedelta(seconds=120))
    for kind, fault in cases:
        run = Run(fault, folder_of(folder, kind, fault, ranks, dtype), steps)
        losses = TRAINERS[kind](run)
        if losses and losses[0] is not None and rank() in (0, ranks - 1):
            (run.folder / "losses.json").write_text(json.dumps(losses))
    if ranks > 1:
        dist.destroy_process_group()


def record(folder, ranks: int, dtype: torch.dtype, cases=CASES, steps: int = 3) -> None:
    """Trains the cases on so many ranks, in forked processes."""
    torch.multiprocessing.start_processes(run_rank, (ranks, dtype, cases, str(folder), steps), nprocs=ranks,
                                          start_method="fork")


def verdict(folder, kind: str, fault: str, ranks: int, dtype: torch.dtype) -> Verdict:
    """What `python -m same_numbers` prints, and whether its first line says where and why."""
    try:
        one, many = folder_of(folder, kind, "", 1, dtype), folder_of(folder, kind, fault, ranks, dtype)
        lines = [each.line for each in compare(one, many).found]
    except ValueError as error:
        lines = [f"error: {error}".replace(f"{folder}/", "")]
    return Verdict(lines, *(bool(lines and fault and re.search(words, lines[0]))
                            for words in EXPECTED.get(f"{kind} {fault}", ("", ""))))


def losses(folder, kind: str, fault: str, ranks: int, dtype: torch.dtype) -> list[float]:
    return json.loads((folder_of(folder, kind, fault, ranks, dtype) / "losses.json").read_text())


def percent(difference: float) -> str:
    """In two digits; 0 below a thousandth of a percent."""
    rounded = float(f"{100 * difference:.2g}")
    return "NaN" if rounded != rounded else f"{rounded:+g} %" if abs(rounded) >= 1e-3 else "0 %"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(TRAINERS)} (default: all)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dtype", default="float64")
    args = parser.parse_args()
    dtype, (found, placed, named, both) = getattr(torch, args.dtype), [0] * 4
    cases = [(kind, fault) for kind, fault in CASES if kind in (args.kinds or TRAINERS)]
    with tempfile.TemporaryDirectory() as folder:
        record(folder, 1, dtype, [case for case in cases if not case[1]], args.steps)
        record(folder, args.ranks, dtype, [case for case in cases if not case[1]])
        record(folder, args.ranks, dtype, [case for case in cases if case[1]], args.steps)
        accused = sum(bool(verdict(folder, kind, fault, args.ranks, dtype).lines) for kind, fault in cases if not fault)
        print(f"| fault | loss of step 3 | of step {args.steps} | the verdict: where, why | |\n|---|---|---|---|---|")
        for kind, fault in cases:
            if fault:
                words, source = faults(TRAINERS[kind])[fault]
                right, wrong = losses(folder, kind, "", 1, dtype), losses(folder, kind, fault, args.ranks, dtype)
                off = [percent(wrong[step - 1] / right[step - 1] - 1) for step in (3, args.steps)]
                said = verdict(folder, kind, fault, args.ranks, dtype)
                found, placed, named = found + bool(said.lines), placed + said.placed, named + said.named
                both += said.placed and said.named
                line = re.sub(r"^step \d+: ", "", said.lines[0]) if said.lines else ""
                row = f"{kind}, {fault}: {words} ({source})", *off, line.replace("*", r"\*")
                marks = ("no", "yes")[said.placed], ("no", "yes")[said.named]
                print(f"| {' | '.join(row)} | {', '.join(marks)} |", flush=True)
    total = sum(bool(fault) for _, fault in cases)
    print(f"\nOf {total} faults {found} are found, {placed} placed and {named} named rightly, {both} both; "
          f"{accused} right versions are accused ({args.ranks} ranks, {args.dtype}).")
    return int(found < total or accused > 0)


if __name__ == "__main__":
    sys.exit(main())
