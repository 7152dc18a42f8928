"""Every way to divide a Llama, also with experts, over ranks with steps 4 to 16, and what a rank then holds and sends.

A split is dp x pp x cp x tp ranks, a schedule with v chunks a rank, a level of ZeRO and, for experts, ep of the dp
ranks among which these are divided. The formulas, each of a rank with P parameters, of N = dp cp ranks with the same
weights, p stages and m micro-batches of B samples, of which a rank has T tokens each:

    bytes     weights 4 P, in bfloat16 2 P more for their copies, which an embedding has not; gradients 4 P; AdamW 8 P,
              and Muon 4 P of the layers' matrices. ZeRO 1 divides the last of these by N, and ZeRO 2 the last two, but
              for the gradient of the largest parameter. ZeRO 3 keeps 16 P / N, two layers' weights and gradients, and
              those of the rest: the embedding, the final norm and projection; with --gather_once those of all layers.
              Of an expert, N is the dp cp / ep ranks with it
    alive     chunks of activations, see alive(); a layer's are those of data_sheets.kept_by_layer. Sequence
              parallelism divides what is between the blocks by tp. A token is in as many experts as it chose
    dp        2 (N-1)/N of 4 P bytes: an all-reduce, or the reduce-scatter and all-gather of ZeRO 1; ZeRO 2
              (m+1) (N-1)/N, as it scatters gradients m times; ZeRO 3 about 3 m (N-1)/N, as it also gathers layers twice
              a micro-batch, in the activations' dtype, without a pipeline the last one once; and the rest once a step.
              --gather_once gathers and scatters everything once. --shard_size divides over fewer ranks than N, and a
              shard's gradient is summed over its copies, once a step
    tp        2 (tp-1)/tp of each sum: 4 of (B, T, D) a layer and micro-batch, one each for the embedding and the head,
              and 12 bytes a token for the loss; --recompute repeats the first one of a layer's forward, with sequence
              parallelism three halves. With experts, the weights of a token's results have gradients to sum, too; with
              Muon, twice the layers' matrices are sent
    cp        keys and values of (B, T) go cp-1 hops forward and cp-1 backward, their gradients in float32 cp hops
    pp        (B, T, D) a micro-batch, chunk and direction, with sequence parallelism 1/tp; a tied embedding's gradient
    ep        four times, (ep-1)/ep of the rows that a layer's experts get: there and back, forward and backward
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from data_sheets import Costs, Shape, kept_by_layer, parse_nodes  # before the modules of cluster/, which it makes known
from planning.machines import NUMBER_BYTES

ENGINES = ("1f1b", "zb", "interleaved", "interleaved_zb")
AXES = ("dp", "tp", "cp", "pp", "ep")
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
    experts: int = 0  # of each layer, in place of one MLP; 0: there are none
    experts_per_token: int = 2
    is_gpu: bool = True
    muon: bool = False  # for the matrices of the layers, which have one average then
    shard_size: int = 0  # ranks over which ZeRO divides; 0: all with the same weights
    gather_once: bool = False  # ZeRO 3 keeps weights from their first use to the end of the step


class Split(NamedTuple):
    dp: int
    tp: int
    pp: int
    engine: str  # one of ENGINES; "-" where there is no pipeline
    zero: int
    cp: int = 1
    ep: int = 1  # of the dp ranks: as many hold an expert each, or several
    sp: bool = False  # sequence parallelism


def splits(job: Job) -> Iterator[Split]:
    """All of them. With tensor parallelism the tokens are divided, too, wherever that can be had: it sends no more."""
    divisors = [n for n in range(1, job.ranks + 1) if job.ranks % n == 0]
    for tp in divisors:
        for pp in (n for n in divisors if job.ranks // tp % n == 0):
            for cp in (n for n in divisors if job.ranks // tp // pp % n == 0):
                dp = job.ranks // tp // pp // cp
                sp = tp > 1 and job.seq_len // cp % tp == 0 and not job.muon
                for engine in ENGINES if pp > 1 else "-":
                    for ep in (n for n in range(1, (job.experts or 1) + 1) if dp % n == 0 == job.experts % n):
                        for zero in range(job.muon, 4) if dp * cp > 1 else [0]:
                            yield Split(dp, tp, pp, engine, zero, cp, ep, sp)


def chunks(job: Job, split: Split) -> int:
    return job.virtual_stages if split.engine.startswith("interleaved") else 1


def shards(job: Job, split: Split) -> tuple[int, int]:
    """Ranks over which ZeRO divides a parameter, and over which one of an expert."""
    n = split.dp * split.cp
    size = job.shard_size if split.zero and job.shard_size else n
    return size, math.gcd(max(size // split.ep, 1), n // split.ep)


def refusal(job: Job, split: Split) -> str | None:
    """Why the steps do not train like this, or why nobody would; None: they do."""
    (dp, tp, pp, _, zero, cp, *_), shape, stages = split, job.shape, split.pp * chunks(job, split)
    m = job.global_batch / dp / job.micro_batch
    if shape.heads % tp or shape.kv_heads % tp or shape.width % tp:
        return f"tp {tp} does not divide the heads, the key/value heads or the MLP's width"
    if stages > shape.layers:
        return f"there are more stages or chunks than the {shape.layers} layers"
    if m % 1:
        return f"dp {dp} does not divide the global batch into whole micro-batches"
    if cp > 1 and job.seq_len % (2 * cp * tp):
        return f"2 x cp {cp} x tp {tp} does not divide the tokens of a sample"
    if job.muon and (cp > 1 or zero > 2 or job.experts or job.shard_size):
        return "Muon with cp, ZeRO 3, experts or groups of shards"
    if dp * cp % shards(job, split)[0] or zero and job.shard_size == 1:
        return f"groups of {job.shard_size} do not divide dp {dp} x cp {cp} replicas"
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


def parameters(job: Job, split: Split, rank: int) -> tuple[float, float, float]:
    """Those of all layers of a rank; of its experts; and of the rest: embedding, final norm and projection."""
    modules, first, last = Costs(job.shape, NODE, split.tp, 1, job.dtype, 1).describe(), rank == 0, rank == split.pp - 1
    tables, count = (first or last) if job.shape.tied else first + last, layers_of(job, split, rank)
    layer, mlp = modules[1]["parameters"], 3 * job.shape.hidden * job.shape.width / split.tp
    if job.experts:
        layer += job.experts * job.shape.hidden - mlp  # the router
    rest = tables * modules[0]["parameters"] + last * modules[-2]["parameters"]
    return count * layer, count * job.experts / split.ep * mlp, rest


def matrices(job: Job, split: Split, rank: int) -> float:
    """Of the parameters of a rank's layers those that are in no norm."""
    return parameters(job, split, rank)[0] - 2 * job.shape.hidden * layers_of(job, split, rank)


def all_parameters(job: Job) -> float:
    return sum(parameters(job, Split(1, 1, 1, "-", 0), 0))


def activations(job: Job, split: Split, rank: int, m: int) -> float:
    """Bytes at most of what a rank's chunks keep.

    W needs the input and the output's gradient of each linear layer. --recompute keeps the inputs of layers and, one
    at a time, a layer's all. Where tokens are divided between the blocks, what norms keep is, but not their output,
    which the block gathers.
    """
    shape, tp, pp, v = job.shape, split.tp, split.pp, chunks(job, split)
    number, tokens = NUMBER_BYTES[job.dtype], job.micro_batch * job.seq_len / split.cp
    kept_of_token = kept_by_layer(shape, tp, number, job.is_gpu)
    hidden, layer, norm = tokens * number * shape.hidden, tokens * sum(kept_of_token.values()), (
        tokens * kept_of_token["two norms"] / 2)
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = 4 * hidden + tokens * number * (2 * (heads + kv_heads) + 3 * shape.width) / tp
    is_last = rank == pp - 1
    head = is_last * (norm + hidden + 12 * tokens * shape.vocab / tp)  # logits and their softmax
    if job.experts:  # their rows, going in and coming out; MLPs of as many tokens as were chosen
        k = job.experts_per_token
        layer += 2 * k * hidden + tokens * number * 4 * (k - 1) * shape.width / tp
    if split.sp:
        layer -= 2 * (1 - 1 / tp) * norm
        head -= is_last * (1 - 1 / tp) * norm
    for_b, for_w = alive(split, rank, m, v)
    head_w = is_last * (hidden + tokens * number * shape.vocab / tp)
    between = hidden / (tp if split.sp else 1)  # the hidden states of a rank between two layers
    each = layers_of(job, split, rank) / v
    kept = for_b * each * (between if job.recompute else layer) + head
    kept += job.recompute * max(0.0, layer - between - head) + for_w * (each * weights + head_w)
    return kept + (4 * between if pp > 1 else 0.0)  # two posted receives, two sends under way


def held(job: Job, split: Split, rank: int, m: int) -> dict[str, float]:
    (layers, experts, rest), (size, of_expert), tp, zero, shape = (
        parameters(job, split, rank), shards(job, split), split.tp, split.zero, job.shape)
    table, count, number = shape.hidden * shape.vocab / tp, layers_of(job, split, rank), NUMBER_BYTES[job.dtype]
    owned, layer = layers + experts + rest, (layers + experts) / count
    divided = (layers + rest) / size + experts / of_expert
    copies = number if number < 4 else 0
    looked_up = table if rank == 0 and (split.pp > 1 or not shape.tied) else 0.0  # an embedding alone is never cast
    weights, gradients = 4 * owned + copies * (owned - looked_up), 4 * (divided if zero > 1 else owned)
    if zero == 2:
        gradients += 4 * max(table, shape.hidden * shape.width / tp)
    if zero == 3:
        at_once = min(2, math.ceil(shape.layers / (split.pp * chunks(job, split))))  # a chunk may be a single layer
        gathered = layers + experts if job.gather_once else at_once * layer
        weights = 4 * divided + number * gathered + 4 * rest + (rank == split.pp - 1) * copies * table
        gradients += 4 * gathered + 4 * rest
    averages = 8 * (divided if zero > 0 else owned) - job.muon * 4 * matrices(job, split, rank) / size
    return {"weights": weights, "gradients": gradients, "AdamW": averages,
            "activations": activations(job, split, rank, m)}


def sent_to_copies(job: Job, split: Split, rank: int) -> float:
    """Bytes of the gradients of a rank's shards, which are summed over their copies in other groups."""
    (layers, experts, rest), (size, of_expert), n = (
        parameters(job, split, rank), shards(job, split), split.dp * split.cp)
    return 8 * ((n - size) / n * (layers + rest) / size + (1 - of_expert * split.ep / n) * experts / of_expert)


def sent(job: Job, split: Split, rank: int, m: int) -> dict[str, float]:
    (_, tp, pp, _, zero, cp, ep, sp), v, shape = split, chunks(job, split), job.shape
    tokens, first, last = m * job.micro_batch * job.seq_len / cp, rank == 0, rank == pp - 1
    (layers, experts, rest), count = parameters(job, split, rank), layers_of(job, split, rank)
    number = NUMBER_BYTES[job.dtype]
    hidden, rows = tokens * shape.hidden * number, job.experts_per_token if job.experts else 1
    sums = (4 + job.recompute * (1.5 if sp else 1)) * count + first + last
    scatters, gathers = (1, 1) if job.gather_once else (m, m * (2 - (pp == 1) / count))
    times, gathered, (size, of_expert) = 4 * (2, 2, m + 1, scatters)[zero], (zero == 3) * number * gathers, (
        shards(job, split))
    exchanged = (size - 1) / size * (times * (layers + rest) + gathered * layers + (zero == 3) * 4 * rest)
    exchanged += (of_expert - 1) / of_expert * (times + gathered) * experts + sent_to_copies(job, split, rank)
    norms = sp * 4 * (2 * count + last + count * job.experts) * shape.hidden  # and routers
    weights = count * tokens * job.experts_per_token * number
    tied = 4 * shape.vocab * shape.hidden / tp if shape.tied and pp > 1 and (first or last) else 0.0
    tied /= size if zero else 1  # of a divided gradient, a rank has its shard
    keys = 2 * count * tokens * shape.kv_heads * shape.head_dim / tp  # numbers of all layers' keys and values
    return {"dp": exchanged,
            "tp": 2 * (tp - 1) / tp * (sums * hidden + last * 12 * tokens + norms + (job.experts > 0) * weights
                                       + job.muon * number * matrices(job, split, rank)),
            "cp": (cp > 1) * keys * ((2 + job.recompute) * (cp - 1) * number + 4 * cp),
            "pp": (2 * v - first - last) * hidden / (tp if sp else 1) + tied if pp > 1 else 0.0,
            "ep": (6 if job.recompute else 4) * (ep - 1) / ep * count * rows * hidden}
