"""Switch a fault on, to practise finding it: a step's train.py under torchrun, with a few lines of source changed.

    python tools/break_it.py --list
    python tools/break_it.py hang -- --timeout 20           # what follows -- are further flags of train.py
    python tools/break_it.py drift --healthy                # the same without the fault
    python tools/break_it.py scale --compare                # beside one process without the fault, step by step
    python tools/break_it.py scale --compare --sgd          # both with SGD instead of AdamW
    python tools/break_it.py stale --find                   # the check that finds it, on ranks in this process
    python tools/break_it.py --find                         # all faults, each with its check
    python tools/break_it.py --find --healthy               # all checks on steps without a fault

The step's own folder stays as it is: the change is made in a copy in a temporary folder, and shown as a diff first.
docs/DEBUGGING.md says how each fault is found.
"""

import argparse
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from lab.launch import ROOT, metrics, torchrun
from lab.program import Program
from museum.faults import SGD, Fault
from museum.faults_beyond import FAULTS

PER_STEP = "{:>4} {:>12} {:>9} {:>11} {:>17} {:>10} {:>7}"


def flags_of(name: str, fault: Fault, further: list[str]) -> list[str]:
    """The flags of train.py. Those given by the user come last, and so override the others."""
    return [*fault.flags, "--model_name", str(ROOT / "assets" / "tiny_llama"), "--log_dir", str(ROOT / "runs"),
            "--run_name", name, *further]


def run(num_processes: int, script: pathlib.Path, flags: list[str], **options) -> int:
    """Runs train.py under torchrun and returns its exit code. A signal to this process ends all of the ranks."""
    process = subprocess.Popen(torchrun(num_processes, script, *flags),
                               env={"OMP_NUM_THREADS": "1", **os.environ}, **options)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:  # the terminal has sent it to torchrun too, which ends the ranks
            pass


def read_metrics(flags: list[str]) -> list[dict]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--log_dir")
    parser.add_argument("--run_name")
    where, _ = parser.parse_known_args(flags)
    return metrics(where.log_dir, where.run_name)


def compare(script: pathlib.Path, program: Program, right: pathlib.Path) -> int:
    """Trains `right` in one process, then `script`, and prints the losses and gradient norms of both, step by step."""
    flags, alone = program.flags, [*program.one_process().flags, "--run_name", "one_process"]
    for processes, path, words in ((1, right, alone), (program.size, script, flags)):
        if code := run(processes, path, words, stdout=subprocess.DEVNULL):
            return code
    print(PER_STEP.format("step", "one process", "loss", "difference", "norm, one process", "norm", "ratio"))
    for row, other in zip(read_metrics(alone), read_metrics(flags), strict=True):
        print(PER_STEP.format(
            row["step"], f"{row['loss']:.4f}", f"{other['loss']:.4f}", f"{other['loss'] - row['loss']:.1e}",
            f"{row['grad_norm']:.4f}", f"{other['grad_norm']:.4f}", f"{other['grad_norm'] / row['grad_norm']:.3f}"))
    return 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    own, further = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, usage="%(prog)s NAME [options] [-- further flags of train.py]")
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument("--list", action="store_true", help="the faults, with a sentence each")
    parser.add_argument("--healthy", action="store_true", help="the same run without the fault")
    parser.add_argument("--sgd", action="store_true", help="SGD instead of AdamW")
    parser.add_argument("--compare", action="store_true", help="beside one process without the fault")
    parser.add_argument("--find", action="store_true", help="run the check that finds it, without torchrun; of NAME or "
                        "of all; with --healthy and no NAME all checks on healthy steps")
    args = parser.parse_args(own)
    args.further = further
    others = [f"--{word}" for word in ("sgd", "compare") if getattr(args, word)]
    if args.find and others:
        raise ValueError(f"--find chooses the check itself: leave {others[0]} out, or --find")
    if args.find and further:
        raise ValueError(f"--find trains a small model and chooses its flags: leave {' '.join(further)} out")
    if args.list or args.find and not args.name:
        return args
    if args.name not in FAULTS:
        what = f"there is no fault {args.name!r}: " if args.name else ""
        raise ValueError(f"{what}choose one of {', '.join(FAULTS)} (--list says what each does)")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        return start(parse_args(sys.argv[1:] if argv is None else argv))
    except ValueError as error:
        print(f"break_it.py: {error}", file=sys.stderr)
        return 2


def start(args: argparse.Namespace) -> int:
    """Does what the flags say; the exit code. Raises ValueError where a step's code is no longer what a fault edits."""
    if args.list:
        for name, fault in FAULTS.items():
            print(f"{name:9} step {fault.step}: {fault.sentence} ({', '.join(fault.reported)})")
        return 0
    if args.find:
        from museum import find_faults  # and with it torch

        if args.name:
            return find_faults.find_one(args.name, FAULTS[args.name], args.healthy)
        return find_faults.find_healthy() if args.healthy else find_faults.find_all(FAULTS)
    fault = FAULTS[args.name]._replace(besides=FAULTS[args.name].besides + SGD * args.sgd)
    with tempfile.TemporaryDirectory() as folder:
        program = fault.program(*args.further, healthy=args.healthy)
        script = program.copy(pathlib.Path(folder))
        print(program.diff(), flush=True)
        print(f"torchrun --nproc_per_node {program.size} {script.parent.name}/train.py {shlex.join(program.flags)}\n",
              flush=True)
        flags = flags_of(args.name, fault, args.further)
        if not args.compare:
            return run(program.size, script, flags)
        right = fault.program(healthy=True).copy(pathlib.Path(folder, "right"))
        return compare(script, program.with_flags(flags), right)


if __name__ == "__main__":
    sys.exit(main())
