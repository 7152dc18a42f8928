"""How to split: every way to divide a Llama over ranks with steps 4 to 16, and what a rank then holds and sends.

    python tools/choose.py --cluster 64xH100:8 --model_name llama-70b --seq_len 4096 --global_batch 512
    python tools/choose.py --cluster 64xH100:8 --model_name llama-8b --num_experts 8 --experts_per_token 2

Those that fit are sorted by the seconds that a step loses: to the bubble, to recomputing, and to all messages, as if
none was hidden behind computation. An "s" behind tp says that the tokens are divided as well (sequence parallelism).
Seconds of a whole step are the business of what_if.py, which simulates them. The formulas are those of splits.py; the
bubble is (p-1) / (k v m + p-1), where k is 3 if backward is in two parts, and else 1.

The page "How to split" of the site computes the same (site/choose.js).
"""

import argparse
from collections import Counter
from typing import NamedTuple

from sizes.data_sheets import (  # before the modules of cluster/, which it makes known
    LINK_SHARE, PRESETS, add_device_flags, read_nodes, read_shape,
)
from plan import add_model_flags, share_of_memory
from ranks.memory import USABLE_MEMORY
from sizes.split_memory import held
from sizes.splits import (
    AXES, Job, Split, all_parameters, check_batch, chunks, refusal, sent, sent_to_copies, shards, splits,
)
from utils import ArgumentParser, UserError, one_clear_error, number, positive_int, to_readable_format, zero_or_more


class Row(NamedTuple):
    """`held`: bytes of the fullest rank by what they are for; `sent`: of the rank that sends most along each axis.
    `lost`: seconds of the bubble, of recomputing and of all messages."""

    split: Split
    microbatches: int
    held: dict[str, float]
    sent: dict[str, float]
    bubble: float
    lost: float

    @property
    def memory(self) -> float:
        return sum(self.held.values())


def price(job: Job, split: Split) -> Row:
    """Of a split that is not refused. Consecutive ranks differ in tp first, then in cp, then in pp, then in dp."""
    (dp, tp, pp, engine, _, cp, ep, _), v = split, chunks(job, split)
    m, ranks = job.global_batch // dp // job.micro_batch, range(pp)
    fullest = max((held(job, split, rank, m) for rank in ranks), key=lambda parts: sum(parts.values()))
    volumes = [sent(job, split, rank, m) for rank in ranks]
    most = {axis: max(volume[axis] for volume in volumes) for axis in AXES}
    bubble = (pp - 1) / ((3 if engine.endswith("zb") else 1) * v * m + pp - 1)
    # Consecutive ranks among which an axis's groups lie
    spans = {"tp": tp, "cp": tp * cp, "pp": tp * cp * pp, "ep": tp * cp * pp * ep}
    spans["dp"] = job.ranks if dp > 1 else tp * cp  # replicas, and ranks that hold the same weights for other tokens
    to_copies, size = max(sent_to_copies(job, split, rank) for rank in ranks), shards(job, split)[0]
    if size < dp * cp:  # groups of consecutive replicas, whose copies are far
        spans["dp"] = tp * size if size <= cp else tp * pp * size
    inside = {axis: job.per_machine % spans[axis] == 0 for axis in AXES}
    seconds = sum((most[axis] - (axis == "dp") * to_copies) / (job.inside if inside[axis] else job.between)
                  for axis in AXES) + to_copies / job.between
    active = all_parameters(job._replace(experts=job.experts and job.experts_per_token))  # a token's
    passes = 6 * active * job.global_batch * job.seq_len / job.ranks / job.flops  # seconds of computing
    return Row(split, m, fullest, most, bubble, passes * ((4 / 3 if job.recompute else 1) / (1 - bubble) - 1) + seconds)


def choose(job: Job) -> tuple[list[Row], list[Row], Counter]:
    """The splits that fit, those that lose least first; those that do not fit, the least needy first; and how often
    the others are refused for which reason."""
    refused, rows = Counter(), []
    for split in splits(job):
        if reason := refusal(job, split):
            refused[reason] += 1
        else:
            rows.append(price(job, split))
    fitting = sorted((row for row in rows if row.memory <= job.memory), key=lambda row: (row.lost, row.memory))
    return fitting, sorted((row for row in rows if row.memory > job.memory), key=lambda row: row.memory), refused


def line(job: Job, row: Row, axes: list[str]) -> str:
    split, numbers = row.split, [row.memory, *row.held.values(), *(row.sent[axis] for axis in axes)]
    sizes = (f"{getattr(split, axis)}{'s' * (axis == 'tp' and split.sp)}" for axis in axes)
    engine = split.engine + f" {job.virtual_stages}" * split.engine.startswith("interleaved")
    return ("".join(f"{size:>4}" for size in sizes)
            + f"  {engine:16}{split.zero:5}{row.microbatches:5}{row.lost:8.2f}{row.bubble:8.1%}"
            + "".join(f"{number / 1e9:8.1f}" for number in numbers))


def report(job: Job, top: int) -> str:
    """What the command prints: of the axes, those that a split of the list has. Raises UserError where no split fits.
    """
    fitting, others, refused = choose(job)
    if not fitting:
        if not others:
            raise UserError(f"no split of {job.ranks} ranks is to be had; {refused.most_common(1)[0][0]}: change that")
        least = f": the least needy of {len(others)} needs {others[0].memory / 1e9:.3g} GB"
        raise UserError(f"no split of {job.ranks} ranks fits into {job.memory / 1e9:.3g} GB{least}; take more ranks, "
                        f"{'' if job.recompute else '--recompute, '}a smaller --micro_batch_size or --seq_len")
    axes = [axis for axis in AXES if axis not in ("cp", "ep") or
            any(getattr(row.split, axis) > 1 for row in fitting[:top])]
    sizes = "".join(f"{axis:>4}" for axis in axes)
    lines = [" " * (len(sizes) + 47) + "GB of the fullest rank                  GB sent by a rank",
             f"{sizes}  schedule         ZeRO    m  lost s  bubble     all weights   grads   AdamW activ."
             + "".join(f"{axis:>8}" for axis in axes), *(line(job, row, axes) for row in fitting[:top]), "",
             f"{len(fitting)} splits fit, {len(others)} do not, {refused.total()} are not to be had:"]
    return "\n".join(lines + [f"{count:6}  {reason}" for reason, count in refused.most_common()])


def read_job(args) -> Job:
    nodes, dtype = read_nodes(args)
    if len(set(nodes)) > 1:
        raise UserError(f"--cluster {args.cluster}: all ranks of the steps' grid are alike, use tools/what_if.py")
    node, shape = nodes[0], read_shape(args.model_name or "llama-8b", args)
    device = node.device
    flops = device.bfloat16 if dtype == "bfloat16" else device.float32
    return Job(shape, args.seq_len or 4096, args.global_batch, args.micro_batch_size, dtype, len(nodes) * node.count,
               node.count, args.memory_fraction * device.memory, device.node_link * LINK_SHARE,
               node.network / node.count * LINK_SHARE, flops * args.efficiency, args.virtual_stages, args.recompute,
               args.num_experts, args.experts_per_token, device.is_gpu, args.optimizer == "muon", args.shard_size,
               args.gather_once)


def parse_args(argv: list[str] | None = None):
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="64xH100:8", default="8xH100:8", help="8 devices in a node")
    add_model_flags(parser, f"a directory with a config.json, a Hub id, or one of {', '.join(PRESETS)}")
    parser.add_argument("--global_batch", type=positive_int, default=512, help="samples a step")
    parser.add_argument("--micro_batch_size", type=positive_int, default=1, help="samples")
    parser.add_argument("--virtual_stages", default=2, help="chunks of interleaved schedules", type=number(
        int, lambda value: value >= 2, "at least 2: one chunk a rank is 1f1b"))
    parser.add_argument("--recompute", action="store_true", help="compute layers again in backward: less memory")
    parser.add_argument("--num_experts", type=zero_or_more, default=0, help="of each layer, in place of its MLP")
    parser.add_argument("--experts_per_token", type=positive_int, help="of these (default: 2)")
    parser.add_argument("--optimizer", choices=["adamw", "muon"], default="adamw", help="of the layers' matrices")
    parser.add_argument("--shard_size", type=zero_or_more, default=0, help="ranks over which ZeRO divides (0: all)")
    parser.add_argument("--gather_once", action="store_true", help="ZeRO 3 gathers weights once a step")
    parser.add_argument("--memory_fraction", type=share_of_memory, default=USABLE_MEMORY,
                        help="of a device's memory that may be used")
    parser.add_argument("--top", type=positive_int, default=10, help="splits to print")
    add_device_flags(parser, "the devices")
    args = parser.parse_args(argv)
    if args.experts_per_token and args.experts_per_token > args.num_experts:
        raise UserError(f"--experts_per_token {args.experts_per_token} is more than --num_experts {args.num_experts}: "
                        "lower it, or take more experts")
    args.experts_per_token = args.experts_per_token or min(2, args.num_experts or 2)
    check_batch(args.global_batch, args.micro_batch_size)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    job = read_job(args)
    print(f"{args.cluster}: {job.ranks} ranks, {job.memory / 1e9:.3g} GB each may be used; {job.dtype}"
          f"{', --recompute' if job.recompute else ''}\n{to_readable_format(all_parameters(job))} parameters; a step "
          f"is {job.global_batch} samples of {job.seq_len} tokens, a micro-batch {job.micro_batch}\n")
    print(report(job, args.top))


if __name__ == "__main__":
    with one_clear_error():
        main()
