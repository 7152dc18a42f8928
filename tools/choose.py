"""How to split: every way to divide a Llama over ranks with steps 4 to 13, and what a rank then holds and sends.

    python tools/choose.py --cluster 64xH100:8 --model_name llama-70b --seq_len 4096 --global_batch 512

A split is dp x tp x pp ranks, a schedule with v chunks a rank, and a level of ZeRO. Those that fit are sorted by the
seconds that a step loses: to the bubble, to recomputing, and to all messages, as if none was hidden behind computation.
Seconds of a whole step are the business of what_if.py, which simulates them. The formulas, each of a rank with P
parameters, of N replicas, p stages and m micro-batches of B samples of T tokens:

    bytes     weights 4 P, in bfloat16 2 P more for their copies; gradients 4 P; AdamW 8 P. ZeRO 1 divides the last of
              these by N, and ZeRO 2 the last two, but for the gradient of the largest parameter. ZeRO 3 keeps 16 P / N,
              two layers' weights and gradients, and those of the rest: the embedding, the final norm and projection
    alive     chunks of activations, see alive(); a layer's and the head's are those of data_sheets.Costs
    dp        2 (N-1)/N of 4 P bytes: an all-reduce, or the reduce-scatter and all-gather of ZeRO 1; ZeRO 2
              (m+1) (N-1)/N, as it scatters gradients m times; ZeRO 3 about 3 m (N-1)/N, as it also gathers layers twice
              a micro-batch, in the activations' dtype and the last one once, and the rest once
    tp        2 (tp-1)/tp of each sum: 4 of (B, T, D) a layer and micro-batch, one each for the embedding and the head,
              and 12 bytes a token for the loss; --recompute repeats the first one of a layer's forward
    pp        (B, T, D) a micro-batch, chunk and direction; a tied embedding's gradient
    bubble    (p-1) / (k v m + p-1), where k is 3 if backward is in two parts, and else 1

The page "How to split" of the site computes the same (site/choose.js).
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from data_sheets import (  # before the modules of cluster/, which it makes known
    LINK_SHARE, PRESETS, Costs, Shape, add_device_flags, parse_nodes, read_nodes, read_shape,
)
from planning.machines import NUMBER_BYTES
from plan import add_model_flags
from utils import ArgumentParser, UserError, one_clear_error, positive_int, to_readable_format

ENGINES = ("1f1b", "zb", "interleaved", "interleaved_zb")
AXES = ("dp", "tp", "pp")
NODE = parse_nodes("1xH100")[0]  # sizes do not depend on it


class Job(NamedTuple):
    """What is to be trained on what. Rates are a rank's own, in bytes/s and FLOP/s; `memory` may be used, in bytes."""

    shape: Shape
    seq_len: int
    global_batch: int
    micro_batch: int
    dtype: str
    ranks: int
    per_machine: int
    memory: float
    inside: float  # a machine
    between: float  # machines
    flops: float
    virtual_stages: int = 2
    recompute: bool = False


class Split(NamedTuple):
    dp: int
    tp: int
    pp: int
    engine: str  # one of ENGINES; "-" where there is no pipeline
    zero: int


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


def splits(job: Job) -> Iterator[Split]:
    divisors = [n for n in range(1, job.ranks + 1) if job.ranks % n == 0]
    for tp in divisors:
        for pp in (n for n in divisors if job.ranks // tp % n == 0):
            dp = job.ranks // tp // pp
            for engine in ENGINES if pp > 1 else "-":
                for zero in range(4 if dp > 1 else 1):
                    yield Split(dp, tp, pp, engine, zero)


def chunks(job: Job, split: Split) -> int:
    return job.virtual_stages if split.engine.startswith("interleaved") else 1


def refusal(job: Job, split: Split) -> str | None:
    """Why the steps do not train like this, or why nobody would; None: they do."""
    (dp, tp, pp, engine, zero), shape, stages = split, job.shape, split.pp * chunks(job, split)
    m = job.global_batch / dp / job.micro_batch
    if shape.heads % tp or shape.kv_heads % tp or shape.width % tp:
        return f"tp {tp} does not divide the heads, the key/value heads or the MLP's width"
    if stages > shape.layers:
        return f"there are more stages or chunks than the {shape.layers} layers"
    if m % 1:
        return f"dp {dp} does not divide the global batch into whole micro-batches"
    if zero > 1 and pp > 1:
        return "ZeRO 2 and 3 have no pipeline, where several micro-batches are under way"
    if job.recompute and engine.endswith("zb"):
        return "zb and interleaved_zb with --recompute: W would keep all that was computed again"
    if m < pp:
        return f"pp {pp}: fewer micro-batches than stages never fill the pipeline"
    return None


def alive(split: Split, rank: int, m: int, v: int) -> tuple[int, int]:
    """Chunks of a rank whose activations are alive at most, if m >= p: for their B, and after it for their W."""
    p, engine = split.pp, split.engine
    if p == 1:
        return 1, 0
    first_round = -(-m // (m // p))
    most = (v - 1) * first_round + (2 * (p - rank) - 1 if engine == "interleaved" else p - rank)
    before = min(most, v * m)
    return before, min(rank, v * m - before) if engine.endswith("zb") else 0


def layers_of(job: Job, split: Split, rank: int) -> int:
    """As torch.tensor_split divides them over p v virtual stages, of which rank r has r, r + p, ..."""
    stages = split.pp * chunks(job, split)
    return sum(job.shape.layers // stages + (s < job.shape.layers % stages) for s in range(rank, stages, split.pp))


def parameters(job: Job, split: Split, rank: int) -> tuple[float, float]:
    """Those of all layers of a rank, and those of the rest: embedding, final norm and projection."""
    modules, first, last = Costs(job.shape, NODE, split.tp, 1, job.dtype, 1).describe(), rank == 0, rank == split.pp - 1
    tables = (first or last) if job.shape.tied else first + last
    rest = tables * modules[0]["parameters"] + last * modules[-2]["parameters"]
    return layers_of(job, split, rank) * modules[1]["parameters"], rest


def activations(job: Job, split: Split, rank: int, m: int) -> float:
    """Bytes at most of what a rank's chunks keep. In bfloat16 all is bfloat16 but the logits of the loss.

    W needs the input and the output's gradient of each linear layer. --recompute keeps the inputs of layers and, one
    at a time, a layer's all.
    """
    shape, (_, tp, pp, *_), v = job.shape, split, chunks(job, split)
    number, tokens = NUMBER_BYTES[job.dtype], job.micro_batch * job.seq_len
    modules = Costs(shape, NODE, tp, tokens, job.dtype, 1).describe()
    hidden, layer = tokens * number * shape.hidden, modules[1]["saved_bytes"]
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = 4 * hidden + tokens * number * (2 * (heads + kv_heads) + 3 * shape.width) / tp
    for_b, for_w = alive(split, rank, m, v)
    is_last = rank == pp - 1
    head = is_last * modules[-1]["saved_bytes"]
    head_w = is_last * (hidden + tokens * number * shape.vocab / tp)
    each = layers_of(job, split, rank) / v
    kept = for_b * each * (hidden if job.recompute else layer) + head
    kept += job.recompute * max(0.0, layer - hidden - head) + for_w * (each * weights + head_w)
    return kept + (4 * hidden if pp > 1 else 0.0)  # two posted receives, two sends under way


def held(job: Job, split: Split, rank: int, m: int) -> dict[str, float]:
    (layers, rest), (n, tp, _, _, zero), shape = parameters(job, split, rank), split, job.shape
    owned, table, layer = layers + rest, shape.hidden * shape.vocab / tp, layers / layers_of(job, split, rank)
    number = NUMBER_BYTES[job.dtype]
    copies = number if number < 4 else 0
    weights, gradients = (4 + copies) * owned, 4 * owned / (n if zero > 1 else 1)
    if zero == 2:
        gradients += 4 * max(table, shape.hidden * shape.width / tp)
    if zero == 3:
        weights = 4 * owned / n + 2 * number * layer + 4 * rest + copies * table
        gradients += 2 * 4 * layer + 4 * rest
    return {"weights": weights, "gradients": gradients, "AdamW": 8 * owned / (n if zero > 0 else 1),
            "activations": activations(job, split, rank, m)}


def sent(job: Job, split: Split, rank: int, m: int) -> dict[str, float]:
    (dp, tp, pp, _, zero), v, shape = split, chunks(job, split), job.shape
    tokens, first, last = m * job.micro_batch * job.seq_len, rank == 0, rank == pp - 1
    (layers, rest), count, number = parameters(job, split, rank), layers_of(job, split, rank), NUMBER_BYTES[job.dtype]
    hidden, sums = tokens * shape.hidden * number, (5 if job.recompute else 4) * count + first + last
    exchanged = (2, 2, m + 1, m)[zero] * 4 * (layers + rest)
    if zero == 3:
        exchanged += m * (number * (2 - 1 / count) * layers + 4 * rest)
    tied = 4 * shape.vocab * shape.hidden / tp if shape.tied and pp > 1 and (first or last) else 0.0
    return {"dp": (dp - 1) / dp * exchanged,
            "tp": 2 * (tp - 1) / tp * (sums * hidden + last * 12 * tokens),
            "pp": (2 * v - first - last) * hidden + tied if pp > 1 else 0.0}


def price(job: Job, split: Split) -> Row:
    """Of a split that is not refused. Consecutive ranks differ in tp first, then in pp, then in dp."""
    dp, tp, pp, engine, _ = split
    m, v, ranks = job.global_batch // dp // job.micro_batch, chunks(job, split), range(pp)
    fullest = max((held(job, split, rank, m) for rank in ranks), key=lambda parts: sum(parts.values()))
    volumes = [sent(job, split, rank, m) for rank in ranks]
    most = {axis: max(volume[axis] for volume in volumes) for axis in AXES}
    bubble = (pp - 1) / ((3 if engine.endswith("zb") else 1) * v * m + pp - 1)
    spans = {"tp": tp, "pp": tp * pp, "dp": job.ranks}  # consecutive ranks among which an axis's groups lie
    seconds = sum(most[axis] / (job.inside if job.per_machine % spans[axis] == 0 else job.between) for axis in AXES)
    passes = 6 * job.shape.parameters * job.global_batch * job.seq_len / job.ranks / job.flops  # seconds of computing
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


def line(job: Job, row: Row) -> str:
    dp, tp, pp, engine, zero = row.split
    engine += f" {job.virtual_stages}" * engine.startswith("interleaved")
    numbers = [row.memory, *row.held.values(), *row.sent.values()]
    return (f"{dp:4}{tp:4}{pp:4}  {engine:16}{zero:5}{row.microbatches:5}{row.lost:8.2f}{row.bubble:8.1%}"
            + "".join(f"{number / 1e9:8.1f}" for number in numbers))


def report(job: Job, top: int) -> str:
    """What the command prints. Raises UserError where no split fits."""
    fitting, others, refused = choose(job)
    if not fitting:
        least = f": the least needy of {len(others)} needs {others[0].memory / 1e9:.3g} GB" if others else ""
        raise UserError(f"no split of {job.ranks} ranks fits into {job.memory / 1e9:.3g} GB{least}; take more ranks, "
                        f"{'' if job.recompute else '--recompute, '}a smaller --micro_batch_size or --seq_len")
    lines = ["                                                           GB of the fullest rank"
             "                  GB sent by a rank",
             "  dp  tp  pp  schedule         ZeRO    m  lost s  bubble     all weights   grads   AdamW activ.      dp"
             "      tp      pp", *(line(job, row) for row in fitting[:top]), "",
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
               node.network / node.count * LINK_SHARE, flops * args.efficiency, args.virtual_stages, args.recompute)


def parse_args(argv: list[str] | None = None):
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="64xH100:8", default="8xH100:8", help="8 devices in a node")
    add_model_flags(parser, f"a directory with a config.json, a Hub id, or one of {', '.join(PRESETS)}")
    parser.add_argument("--global_batch", type=positive_int, default=512, help="samples a step")
    parser.add_argument("--micro_batch_size", type=positive_int, default=1, help="samples")
    parser.add_argument("--virtual_stages", type=positive_int, default=2, help="chunks of interleaved schedules")
    parser.add_argument("--recompute", action="store_true", help="compute layers again in backward: less memory")
    parser.add_argument("--memory_fraction", type=float, default=0.9, help="of a device's memory that may be used")
    parser.add_argument("--top", type=positive_int, default=10, help="splits to print")
    add_device_flags(parser, "the devices")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    job = read_job(args)
    print(f"{args.cluster}: {job.ranks} ranks, {job.memory / 1e9:.3g} GB each may be used; {job.dtype}"
          f"{', --recompute' if job.recompute else ''}\n{to_readable_format(job.shape.parameters)} parameters; a step "
          f"is {job.global_batch} samples of {job.seq_len} tokens, a micro-batch {job.micro_batch}\n")
    print(report(job, args.top))


if __name__ == "__main__":
    with one_clear_error():
        main()
