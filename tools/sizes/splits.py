"""Every way to divide a Llama, also with experts, over ranks with steps 4 to 16, and what a rank then holds and sends.

A split is dp x pp x cp x tp ranks, a schedule with v chunks a rank, a level of ZeRO and, for experts, ep of the dp
ranks among which these are divided. The formulas, each of a rank with P parameters, of N = dp cp ranks with the same
weights, p stages and m micro-batches of B samples, of which a rank has T tokens each. What it holds: split_memory.py.

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

from sizes.data_sheets import Costs, Shape, parse_nodes  # before the modules of cluster/, which it makes known
from planning.machines import NUMBER_BYTES
from utils import UserError

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


def check_batch(global_batch: int, micro_batch: int) -> None:
    if global_batch % micro_batch:
        raise UserError(f"--micro_batch_size {micro_batch} does not divide --global_batch {global_batch}: change one")


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
    divides_matrices = cp > 1 or zero > 2 or job.experts or job.shard_size
    if job.muon and divides_matrices:
        return "Muon with cp, ZeRO 3, experts or groups of shards"
    if dp * cp % shards(job, split)[0] or zero and job.shard_size == 1:
        return f"groups of {job.shard_size} do not divide dp {dp} x cp {cp} replicas"
    if m < pp:
        return f"pp {pp}: fewer micro-batches than stages never fill the pipeline"
    return None


def layers_of_chunks(job: Job, split: Split, rank: int) -> list[int]:
    """As torch.tensor_split divides them over p v virtual stages, of which rank r has r, r + p, ..."""
    stages = split.pp * chunks(job, split)
    return [job.shape.layers // stages + (s < job.shape.layers % stages) for s in range(rank, stages, split.pp)]


def layers_of(job: Job, split: Split, rank: int) -> int:
    return sum(layers_of_chunks(job, split, rank))


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
    has_a_copy = shape.tied and pp > 1 and (first or last)
    tied = 4 * shape.vocab * shape.hidden / tp if has_a_copy else 0.0
    tied /= size if zero else 1  # of a divided gradient, a rank has its shard
    keys = 2 * count * tokens * shape.kv_heads * shape.head_dim / tp  # numbers of all layers' keys and values
    return {"dp": exchanged,
            "tp": 2 * (tp - 1) / tp * (sums * hidden + last * 12 * tokens + norms + (job.experts > 0) * weights
                                       + job.muon * number * matrices(job, split, rank)),
            "cp": (cp > 1) * keys * ((2 + job.recompute) * (cp - 1) * number + 4 * cp),
            "pp": (2 * v - first - last) * hidden / (tp if sp else 1) + tied if pp > 1 else 0.0,
            "ep": (6 if job.recompute else 4) * (ep - 1) / ep * count * rows * hidden}
