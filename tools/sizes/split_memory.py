"""What a rank of a split holds when it holds most, in bytes: formulas for what tools/dry_run.py counts.

Of P parameters, of N ranks with the same weights:

    weights       4 P, and in bfloat16 2 P for their copies, which an embedding alone has not. ZeRO 3 keeps 4 P / N, two
                  layers' weights, and those of the rest: the embedding, the final norm and projection; with
                  --gather_once those of all layers. Of an expert, N is the dp cp / ep ranks with it
    gradients     4 P. ZeRO 2 and 3 keep 4 P / N, a buffer that backward fills and one that is under way
    AdamW         8 P, and Muon 4 P of the layers' matrices, with ZeRO divided by N
    activations   what the chunks of a rank keep for their backward, see alive(), and what a backward needs besides

A rank holds most in a backward that begins when its chunks keep most. What it then needs besides is most

    at the loss         on the last stage: the logits, their softmax and its gradient, in float32
    at the MLP          of a layer: the gradients of silu(gate) and up, or of their common input
    at the attention    the layer's MLP has been freed, but in bfloat16 the gradients of the copies of its weights pile
                        up: autograd casts them last, since it made the copies first
    at the results      of experts: their gradients, three times
    at the embedding    on the first stage: the gradient of its table, when all layers of the chunk are done

With --recompute chunks keep the inputs of layers and, one at a time, a layer's all. Sequence parallelism divides what
is between the blocks by tp. A token is in as many experts as it chose; all get equally many.

The formulas are those of an accumulation of several micro-batches, when there are gradients of earlier ones.
"""

import itertools
from typing import NamedTuple

from sizes.data_sheets import kept_by_layer  # before the modules of cluster/, which it makes known
from planning.machines import NUMBER_BYTES
from sizes.splits import Job, Split, chunks, layers_of_chunks, matrices, parameters, shards


class Sizes(NamedTuple):
    """Bytes of one micro-batch on a rank. `hidden`: its hidden states inside of a block, and `between` two of them.
    `layer`: what a layer keeps for its backward, and `for_w`: of this what W needs, the input and the output's gradient
    of each linear layer. `wide`: a tensor as wide as the MLP; `heads`: queries, keys, values and outputs."""

    hidden: float
    between: float
    layer: float
    for_w: float
    wide: float
    heads: float
    norm: float
    logits: float  # in the activations' dtype


def sizes_of(job: Job, split: Split) -> Sizes:
    """Where tokens are divided between the blocks, what norms keep is, but not their output, which the block gathers.
    Experts keep their rows, going in and coming out; the router has a rank's own tokens."""
    shape, tp, k = job.shape, split.tp, job.experts_per_token if job.experts else 1
    number, tokens = NUMBER_BYTES[job.dtype], job.micro_batch * job.seq_len / split.cp
    parts, hidden, of_block = kept_by_layer(shape, tp, number, job.is_gpu), tokens * number * shape.hidden, (
        tp if split.sp else 1)
    wide, heads = tokens * k * number * shape.width / tp, (
        tokens * number * 2 * shape.head_dim * (shape.heads + shape.kv_heads) / tp)
    layer = tokens * (sum(parts.values()) - (1 - 1 / of_block) * parts["two norms"]) + 4 * (1 - 1 / k) * wide
    layer += 2 * k * hidden - (1 - 1 / of_block) * hidden if job.experts else 0.0
    return Sizes(hidden, hidden / of_block, layer, 4 * hidden + heads + 3 * wide, wide, heads,
                 tokens * parts["two norms"] / 2 / of_block, tokens * number * shape.vocab / tp)


def alive(split: Split, rank: int, m: int, layers: list[int]) -> tuple[int, int, int]:
    """How many chunks' activations of a rank are alive at most, if m >= p, for their B; how many layers these have at
    most, if its chunks have so many; and how many chunks' are alive for their W after that."""
    p, v, engine = split.pp, len(layers), split.engine
    if p == 1:
        return 1, layers[0], 0
    first_round = -(-m // (m // p))
    most = (v - 1) * first_round + (2 * (p - rank) - 1 if engine == "interleaved" else p - rank)
    before = min(most, v * m)
    forward = [each for each in layers for _ in range(first_round)]  # round after round, and backward from the last one
    started, ended = [*itertools.accumulate(forward * 3, initial=0)], [*itertools.accumulate(forward[::-1], initial=0)]
    alive_layers = max(started[before + i] - ended[i] for i in range(min(len(forward), v * m - before) + 1))
    return before, alive_layers, min(rank, v * m - before) if engine.endswith("zb") else 0


def is_divided(split: Split, rank: int) -> bool:
    """Whether backward is in two parts. With zb it is in one on the first stage."""
    return split.engine.endswith("zb") and (rank > 0 or split.engine.startswith("interleaved"))


def kept(job: Job, split: Split, rank: int, m: int) -> float:
    """Bytes at most of what a rank's chunks keep, of messages, and of cosines and sines."""
    sizes, v, is_last, number = (
        sizes_of(job, split), chunks(job, split), rank == split.pp - 1, NUMBER_BYTES[job.dtype])
    layers = layers_of_chunks(job, split, rank)
    for_b, of_layers, for_w = alive(split, rank, m, layers)
    found = of_layers * (sizes.between if job.recompute else sizes.layer)
    found += for_w * (sum(layers) / v * sizes.for_w + is_last * (sizes.hidden + sizes.logits))
    if split.pp > 1:  # outputs of chunks, a posted receive, the gradient that was sent last; gloo keeps more of them
        sends_back = rank > 0 or v > 1
        found += sizes.between * (for_b - is_last + 2 * sends_back + (not job.is_gpu) * split.pp * v)
    return found + 2 * job.micro_batch * job.seq_len / split.cp * job.shape.head_dim * number


class State(NamedTuple):
    """Bytes of weights, gradients and AdamW's averages between two micro-batches; of the weights those of layers that
    are `gathered` for a while, and of gradients those that a backward is `filling`."""

    weights: float
    gradients: float
    averages: float
    gathered: float
    filling: float


def state_of(job: Job, split: Split, rank: int) -> State:
    (layers, experts, rest), (size, of_expert), zero, shape = (
        parameters(job, split, rank), shards(job, split), split.zero, job.shape)
    of_chunks, number = layers_of_chunks(job, split, rank), NUMBER_BYTES[job.dtype]
    table, owned, divided = shape.hidden * shape.vocab / split.tp, layers + experts + rest, (
        (layers + rest) / size + experts / of_expert)
    copies, count = number * (number < 4), sum(of_chunks)
    averages = 8 * (divided if zero > 0 else owned) - job.muon * 4 * matrices(job, split, rank) / size
    if zero < 3:
        looked_up = table if rank == 0 and (split.pp > 1 or not shape.tied) else 0.0  # an embedding alone has no copy
        weights, gathered = 4 * owned + copies * (owned - looked_up), 0.0
    else:
        gathered = number * (layers + experts) * (1 if job.gather_once else min(2, max(of_chunks)) / count)
        weights = 4 * divided + gathered + 4 * rest + (rank == split.pp - 1) * copies * table
    if zero < 2 or job.gather_once:
        return State(weights, 4 * owned, averages, 0.0, 0.0)
    if zero == 3:
        under_way, filling = rest if rank == 0 else layers / count, (experts or layers) / count
    else:  # buckets of a matrix; gradients of copies fill them when the layers are done
        under_way = table if rank == 0 else shape.hidden * shape.heads * shape.head_dim / split.tp
        filling = 0.0 if copies else shape.hidden * shape.width / split.tp
    under_way *= 1 + (1 if job.is_gpu else size - 1) / size  # with what is received
    if zero == 3 and is_divided(split, rank):  # B has the norms' gradients, for which it makes all buffers
        under_way, filling = layers + experts, 0.0
    return State(weights, 4 * (divided + under_way), averages, gathered, 4 * filling)


def moments(job: Job, split: Split, rank: int) -> dict[str, tuple[float, float, float]]:
    """Weights, gradients and what a backward needs besides what is kept, at each moment when this may be most."""
    sizes, state, shape = sizes_of(job, split), state_of(job, split, rank), job.shape
    number, is_zb, is_last = NUMBER_BYTES[job.dtype], is_divided(split, rank), rank == split.pp - 1
    of_chunk, k, tokens = layers_of_chunks(job, split, rank)[-1], job.experts_per_token, (
        job.micro_batch * job.seq_len / split.cp)
    piled = number if number < 4 and split.zero < 3 and not is_zb else 0  # bytes of a copy's gradient
    weight, table = piled * shape.hidden * shape.width / split.tp, shape.hidden * shape.vocab / split.tp
    (layers, experts, _), count = parameters(job, split, rank), sum(layers_of_chunks(job, split, rank))
    hidden, between, wide, received = sizes.hidden, sizes.between, sizes.wide, sizes.between
    in_layer = piled * (layers + experts) / count
    a_layer = sizes.between if job.recompute else sizes.layer
    at_mlp = max(weight + wide + max(split.sp * hidden, wide), 3 * weight + 2 * hidden - 3 * wide)
    freed_by_mlp, copies_of_mlp = 4 * wide + hidden, 3 * weight  # the gradients of its copies pile up
    if job.experts:
        at_mlp = split.sp * hidden + 3 * wide * split.ep / job.experts
        freed_by_mlp, copies_of_mlp = 4 * wide - between, copies_of_mlp * job.experts / split.ep
    at_outputs = sizes.heads + copies_of_mlp - freed_by_mlp
    left_of_layer = sizes.for_w if is_zb else hidden + in_layer
    at_inputs = 3 * hidden + left_of_layer - sizes.layer  # of what q, k and v multiply, when these are freed
    at_attention = max(at_outputs, at_inputs)
    again = job.recompute * (sizes.layer - sizes.between)
    later = (not is_last or chunks(job, split) > 1) * between + (of_chunk - 1) * (
        in_layer - a_layer + is_zb * sizes.for_w)
    gradients, begun = state.gradients + state.filling, received + again + max(at_mlp, at_attention)
    found = {"layer": (state.weights, gradients, begun + max(0.0, later))}  # the last one, or the first one
    if job.experts:  # gradients of the results, of their weights, and of the results in the experts' order
        found["results"] = state.weights, state.gradients, (
            received + again + split.sp * hidden + 3 * k * hidden + max(0.0, later))
    if is_last:
        freed = 1 if split.pp > 1 else 1 - 1 / min(2, of_chunk)
        logits = sizes.norm + hidden + 12 * tokens * shape.vocab / split.tp
        found["loss"] = state.weights - freed * state.gathered, state.gradients, logits
    if rank == 0:
        done = layers_of_chunks(job, split, rank)[0] * (in_layer - a_layer + is_zb * sizes.for_w)
        found["embedding"] = state.weights - state.gathered, gradients, (
            received + 4 * table + 4 * tokens * shape.hidden + done)
    return found


def held(job: Job, split: Split, rank: int, m: int) -> dict[str, float]:
    """Bytes of each kind at the moment when a rank holds most."""
    weights, gradients, besides = max(moments(job, split, rank).values(), key=sum)
    return {"weights": weights, "gradients": gradients, "AdamW": state_of(job, split, rank).averages,
            "activations": kept(job, split, rank, m) + besides}
