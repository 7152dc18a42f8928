"""One rank of any world, on a laptop: the step's own train.py runs one optimizer step, without numbers and other ranks.

    python tools/dry_run.py --world 8 --rank 3 step8_pipeline_parallel_1f1b/train.py --tp_size 2 --pp_size 2 --dp_size 2
    python tools/dry_run.py --world 16384 --rank all-kinds --machine H100:8 beyond/step11_virtual_stages/train.py \\
        --model_name llama-405b --seq_len 8192 --micro_batch_size 1 --gradient_accumulation_steps 16 \\
        --tp_size 8 --pp_size 16 --dp_size 128

What stands behind train.py are the flags of torchrun's command, for any step from 3 on. --model_name may also be one
of the models of data_sheets.py. The corpus is not read. --device auto is the machine's.

It prints what the rank holds, what it sends to whom, its actions, and how long a step would take on the machine, for
which the first, the second and the last stage of its pipeline are run, too; those between are taken for the second. A
rank's share of the model's TFLOP is as the steps count it for MFU = TFLOP / seconds / peak. What is counted is that of
real runs, seconds are those of data sheets. See lab/watch/memory.py for what differs from a run.
"""

import argparse
import json
import pathlib
import re
import sys

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from lab.watch.dry_run import run_rank
from lab.launch import writing
from lab.watch.memory import KINDS, Event
from sizes.clock import Clock, Machine, Rank, machine_of, predict, write_trace
from sizes.data_sheets import (  # before the modules of cluster/, which it makes known
    PRESETS, add_device_flags, find_device, plausible, read_nodes,
)
from utils import ArgumentParser, UserError, one_clear_error, positive_int, to_readable_format

PHASES = ("before the step", "after backward", "after the step")


def find_script(args) -> pathlib.Path:
    """Raises UserError where it is no train.py of a step that trains on samples."""
    script = pathlib.Path(args.script).resolve()
    such = "such as step8_pipeline_parallel_1f1b/train.py"
    if not script.is_file():
        raise UserError(f"{args.script} is no file: give the train.py of a step, {such}")
    if script.name != "train.py" or not (script.parent / "dataloader.py").is_file():
        raise UserError(f"{args.script}: a dry run needs the train.py of a step from 3 on, {such}; steps 1 and 2 have "
                        "no samples to train on")
    return script


def run(args, script: pathlib.Path, rank: int, machine: Machine, is_gpu: bool) -> Rank:
    """Raises UserError where the step does."""
    if any(flag.startswith("--generators") for flag in args.flags):
        raise UserError("--generators: a dry run has no numbers, and so no answers and no rewards: leave it out")
    try:
        return run_rank(script, args.flags, args.world, rank, machine.per_machine, machine.seconds_of, is_gpu, PRESETS)
    except ValueError as error:  # each step has a UserError of its own
        if "UserError" in (each.__name__ for each in type(error).__mro__):
            raise UserError(str(error)) from None
        raise


def name_of(ranks: tuple[int, ...]) -> str:
    steps = {b - a for a, b in zip(ranks, ranks[1:])}
    if len(ranks) <= 4 or len(steps) > 1:
        return ", ".join(map(str, ranks[:4])) + ", ..." * (len(ranks) > 4)
    return f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"


def sent(rank: Rank) -> list[dict]:
    """What the rank sends and receives, by axis, kind and partners."""
    rows: dict[tuple, list[int]] = {}
    for event in rank.count.log:
        if isinstance(event, Event):
            partners = event.group if event.peer is None else (event.peer,)
            rows.setdefault((event.axis, event.kind, partners), []).append(event.num_bytes)
    return [{"axis": axis, "what": kind, "with": [*partners], "count": len(sizes), "bytes": sum(sizes),
             "largest": max(sizes)} for (axis, kind, partners), sizes in sorted(rows.items())]


def describe(rank: Rank, clock: Clock, machine: Machine, kinds: list[tuple[Rank, Clock]]) -> dict:
    """All that is printed, as --json writes it."""
    grid, count = rank.grid, rank.count
    found, actions = predict(rank, clock, machine, kinds), []
    if rank.schedule:
        order = rank.schedule(grid.pp_rank, grid.pp_world_size, rank.microbatches)
        actions = [f"{kind}{i}" + "".join(f".{each}" for each in chunk if each) for kind, i, *chunk in order]
    held = {name: count.snapshots[name] for name in PHASES if name in count.snapshots}
    return {
        "rank": grid.global_rank, "world": grid.world_size, "place": str(grid),
        "parameters": rank.parameters, "held": {**held, "at the peak": dict(count.peak)}, "peak_in": count.peak_at,
        "peak": count.peak.total(), "sent": sent(rank), "actions": actions, "flops": found.flops,
        "computed_flops": count.flops, "bound_by_memory": clock.bound_by_memory,
        "store_operations": rank.store_operations,
        "seconds": {"step": found.seconds, "computing": found.computing, "bubble": found.bubble,
                    **{f"waiting for {axis}": value for axis, value in found.exposed.items()}}, "mfu": found.mfu}


def table(found: dict) -> str:
    lines = [f"rank {found['rank']} of {found['world']}, {found['place']}: "
             f"{to_readable_format(found['parameters'])} parameters", "",
             "GB held" + " " * 25 + "".join(f"{kind:>13}" for kind in ("all", *KINDS))]
    for phase, held in found["held"].items():
        phase += f", in {found['peak_in']}" * (phase == "at the peak")
        sizes = sum(held.values()), *(held[kind] for kind in KINDS)
        lines.append(f"{phase:32}" + "".join(f"{size / 1e9:13.3f}" for size in sizes))
    lines += ["", f"{'axis':6}{'what':20}{'times':>7}{'GB sent':>10}{'MB at once':>12}  with ranks"]
    lines += [f"{row['axis']:6}{row['what']:20}{row['count']:7}{row['bytes'] / 1e9:10.3f}{row['largest'] / 1e6:12.3f}  "
              f"{name_of(tuple(row['with']))}" for row in found["sent"]]
    if actions := found["actions"]:
        lines += ["", f"{len(actions)} actions: {' '.join(actions[:24])}{' ...' * (len(actions) > 24)}"]
    parts = {name: f"{name} {value:.3g}" for name, value in found["seconds"].items()}
    del parts["step"]
    computed = f"{found['computed_flops'] / 1e12:.4g} TFLOP"
    parts["computing"] += f" ({computed}, {found['bound_by_memory']:.3g} s bound by memory)"
    lines += ["", f"{found['flops'] / 1e12:.4g} TFLOP of the model a rank; {found['seconds']['step']:.4g} s a step, of "
              f"which {', '.join(parts.values())}; {found['mfu']:.1%} MFU"]
    return "\n".join(lines)


def read_machine(args) -> tuple[Machine, float, bool]:
    """The machine, bytes of a device's memory, and whether it is a GPU."""
    match = re.fullmatch(r"([A-Za-z]\w*)(?::(\d{1,6}))?", args.machine)
    if not match or not (number := int(match[2] or 1)):
        raise UserError(f"--machine {args.machine}: write the device and how many a machine has, as in H100:8; "
                        "--inside and --between say what its links carry")
    find_device(match[1], f"--machine {args.machine}")
    dtypes = [word.removeprefix("--dtype=") for before, word in zip(["", *args.flags], args.flags)
              if before == "--dtype" or word.startswith("--dtype=")]
    args.cluster, args.dtype = f"{number}x{match[1]}:{number}", "float32" if "float32" in dtypes else None
    [node], _ = read_nodes(args)
    machine = machine_of(node, args.efficiency)
    changes = {name: value * 1e9 for name in ("inside", "between") if (value := getattr(args, name))}
    return machine._replace(**changes), node.device.memory, node.device.is_gpu


def parse_args(argv: list[str] | None = None):
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=positive_int, required=True, help="ranks there are")
    parser.add_argument("--rank", default="0", help="which one of them, or all-kinds: the first, second and last stage")
    parser.add_argument("--machine", default="H100:8", metavar="H100:8", help="8 devices of a data sheet in a machine")
    parser.add_argument("--inside", type=plausible, help="GB/s of a device inside a machine, instead")
    parser.add_argument("--between", type=plausible, help="GB/s of a device between machines, instead")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON")
    parser.add_argument("--timeline", metavar="FILE", help="write the predicted step for https://ui.perfetto.dev")
    add_device_flags(parser, "the device")
    parser.add_argument("script", metavar="STEP/train.py")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="FLAGS", help="of train.py")
    args = parser.parse_args(argv)
    if args.world > 999_999:
        raise UserError(f"--world {args.world}: take fewer ranks, up to 999999")
    if args.rank != "all-kinds" and not args.rank.isdecimal():
        raise UserError(f"--rank {args.rank} is no number of a rank, and not all-kinds")
    if args.rank != "all-kinds" and int(args.rank) >= args.world:
        raise UserError(f"--rank {args.rank} is none of the ranks 0 to {args.world - 1} of --world {args.world}")
    if args.timeline:
        try:
            pathlib.Path(args.timeline).parent.mkdir(parents=True, exist_ok=True)
            open(args.timeline, "a").close()  # before the run, and without taking anything from an older one
        except OSError as error:
            raise UserError(f"--timeline {args.timeline} can't be written ({error.strerror}): choose another one"
                            ) from None
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    (machine, memory, is_gpu), script = read_machine(args), find_script(args)
    first = run(args, script, 0 if args.rank == "all-kinds" else int(args.rank), machine, is_gpu)
    ranks = {first.grid.global_rank: first}
    for number in first.kinds():
        ranks[number] = ranks.get(number) or run(args, script, number, machine, is_gpu)
    clocks = {number: Clock(rank, machine) for number, rank in ranks.items()}
    kinds = [(ranks[number], clocks[number]) for number in first.kinds()]
    shown = first.kinds() if args.rank == "all-kinds" else [int(args.rank)]
    found = [describe(ranks[number], clocks[number], machine, kinds) for number in shown]
    fullest = max(found, key=lambda each: each["peak"])
    if args.timeline:
        last = ranks[shown[-1]], clocks[shown[-1]]
        with writing(args.timeline):
            write_trace(args.timeline, *last, predict(*last, machine, kinds))
    if args.json:
        print(json.dumps(found if len(found) > 1 else found[0], indent=1))
        return
    print("\n\n".join(table(each) for each in found))
    if len(found) > 1:
        print(f"\nrank {fullest['rank']} is the fullest")
    fits = "fits" if fullest["peak"] <= memory else "does not fit"
    print(f"{fullest['peak'] / 1e9:.1f} GB: {fits} into {memory / 1e9:.0f} GB")


if __name__ == "__main__":
    with one_clear_error():
        main()
