"""Switch a fault on, to practise finding it: a step's train.py under torchrun, with a few lines of source changed.

    python tools/break_it.py --list
    python tools/break_it.py hang -- --timeout 20           # what follows -- are further flags of train.py
    python tools/break_it.py drift --healthy                # the same without the fault
    python tools/break_it.py scale --compare                # beside one process without the fault, step by step
    python tools/break_it.py scale --compare --sgd          # both with SGD instead of AdamW
    python tools/break_it.py stale --find                   # the check that shows it, on ranks in this process
    python tools/break_it.py partial --find --check types   # another check
    python tools/break_it.py --find                         # all faults, each with its check
    python tools/break_it.py --find --healthy               # all checks on steps without a fault
    python tools/break_it.py --guess tp                     # a fault of this axis, at random: which one is it?

The step's own folder stays as it is: the change is made in a copy in a temporary folder, and shown as a diff first.
docs/DEBUGGING.md says how a fault is found.
"""

import argparse
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import tempfile
import textwrap

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from lab.launch import ROOT, metrics, torchrun
from lab.program import Program
from museum.fault import Fault
from museum.faults import FAULTS

CHECKS = ("numbers", "bytes", "messages", "schedule", "types")  # those of museum/checks.py, which needs torch
SGD = (("train.py", "torch.optim.AdamW(model.named_parameters(), lr=args.learning_rate, fused=True)",
        "torch.optim.SGD(model.named_parameters(), lr=args.learning_rate)"),)
ROW = "{:12} {:>8}  {:8}  {:10}  {}"
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


def find_one(fault: Fault, check: str, only_healthy: bool) -> int:
    """Prints what a check says without the fault and with it. Returns 1 for an alarm, with the fault if it is on."""
    from museum import checks

    for healthy in (True,) if only_healthy else (True, False):
        found = checks.find(fault, check, healthy)
        word = "ALARM" if found.alarm else "no alarm" if found.tried else "not tried"
        print(f"{'without' if healthy else 'with'} {fault.name}: {check}: {word}: {found.saw}", flush=True)
    return int(found.alarm)


def find_all(check: str) -> int:
    """Prints a table of what each fault's own check says, or this one. Returns 1 for a false alarm, or where a fault's
    own check does not find it."""
    from museum import checks

    caught = false_alarms = tried = 0
    print(ROW.format("fault", "where", "check", "without it", "with it"))
    for name, fault in FAULTS.items():
        used = check or next(iter(fault.seen))
        healthy, broken = checks.find(fault, used, True), checks.find(fault, used)
        caught, false_alarms, tried = caught + broken.alarm, false_alarms + healthy.alarm, tried + broken.tried
        saw = " ".join([line for i, line in enumerate(broken.saw.split("\n")) if i == 0 or line.startswith("  rank")])
        print(ROW.format(name, fault.step, used, "ALARM" if healthy.alarm else "no alarm", textwrap.shorten(saw, 120) if
                         broken.alarm or not broken.tried else "NO ALARM"), flush=True)
    others = f", {len(FAULTS) - tried} not tried" if tried < len(FAULTS) else ""
    print(f"{caught} of {len(FAULTS)} caught{others}, {false_alarms or 'no'} alarms without a fault")
    return int(false_alarms > 0 or not check and caught < len(FAULTS))


def find_healthy(check: str) -> int:
    """Runs the checks, or this one, on steps as they are, with a line for each topology. Returns 1 for an alarm."""
    from museum import checks

    alarms, names = 0, [each for each in checks.HEALTHY if check in ("", each)]
    cases = [(where, names) for where in checks.TOPOLOGIES if names]
    last = [f"{', '.join(names)} on {len(cases)} healthy topologies"] * bool(names)
    if check in ("", "types"):
        from museum.typed import GRIDS

        cases += [(where, ["types"]) for where in GRIDS]
        last.append(f"types on {len(GRIDS)} grids")
    for where, of_these in cases:
        saw, (step, *flags) = checks.healthy_alarms(where, of_these), where.split()
        alarms, ranks = alarms + len(saw), Program(step, flags).size
        topology = f"step {step:>2}, {ranks:,} rank{'s' * (ranks > 1)}, {' '.join(flags) or 'no flags'}"
        print(f"{topology}: {'; '.join(saw) or 'no alarm'}", flush=True)
    print(f"{alarms or 'no'} alarms: {'; '.join(last)}")
    return int(alarms > 0)


def parse_args(argv: list[str]) -> argparse.Namespace:
    own, further = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, usage="%(prog)s NAME [options] [-- further flags of train.py]")
    parser.add_argument("name", nargs="?", metavar="NAME", help=", ".join(FAULTS))
    parser.add_argument("--list", action="store_true", help="the faults, with a sentence each")
    parser.add_argument("--healthy", action="store_true", help="the same run without the fault")
    parser.add_argument("--sgd", action="store_true", help="SGD instead of AdamW")
    parser.add_argument("--compare", action="store_true", help="beside one process without the fault")
    parser.add_argument("--find", action="store_true", help="run the check that shows it, without torchrun; of NAME or "
                        "of all; with --healthy and no NAME all checks on healthy steps")
    parser.add_argument("--check", default="", help=f"for --find, instead of the fault's own: {', '.join(CHECKS)}")
    parser.add_argument("--guess", nargs="?", const="", metavar="AXIS", help="which fault is it? At random, of dp, "
                        "zero, tp, pp, cp or ep, or of all of them")
    parser.add_argument("--seed", type=int, help="of --guess")
    args = parser.parse_args(own)
    args.further = further
    others = [f"--{word}" for word in ("sgd", "compare") if getattr(args, word)]
    if args.find and others:
        raise ValueError(f"--find chooses the check itself: leave {others[0]} out, or --find")
    if args.find and further:
        raise ValueError(f"--find trains a small model and chooses its flags: leave {' '.join(further)} out")
    if args.check and (not args.find or args.check not in CHECKS):
        raise ValueError(f"--check {args.check} is not one of {', '.join(CHECKS)}, with --find")
    if args.list or args.guess is not None or args.find and not args.name:
        return args
    if args.name not in FAULTS:
        what = f"there is no fault {args.name!r}: " if args.name else ""
        raise ValueError(f"{what}choose one of {', '.join(FAULTS)} (--list says what each does)")
    if not args.find and not FAULTS[args.name].is_step:
        raise ValueError(f"{args.name} is a fault of {FAULTS[args.name].where}, not of a step: try {args.name} --find")
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
            where = f"step {fault.step}" if fault.is_step else " ".join(fault.where.split()[:2])
            print(f"{name:9} {where}: {fault.sentence} ({', '.join(fault.reported)})")
        return 0
    if args.guess is not None:
        from museum.guess import guess

        return guess(args.guess, args.seed)
    if args.find and args.name:
        return find_one(FAULTS[args.name], args.check or next(iter(FAULTS[args.name].seen)), args.healthy)
    if args.find:
        return find_healthy(args.check) if args.healthy else find_all(args.check)
    return train(args)


def train(args: argparse.Namespace) -> int:
    """Trains under torchrun, and returns its exit code."""
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
