"""Step time and memory of a grid dp x pp x tp on a cluster known from data sheets: a few formulas, all from textbooks.

    a layer, a micro-batch   FLOPs / (peak x efficiency)  +  bytes that weights and activations move / memory bandwidth
                             forward 2 FLOPs a weight and token, and causal attention; backward twice that
    tp                       4 all-reduces a layer of the hidden states (B, T, D); nothing hides them
    pp                       1F1B's or AFAB's time with the transfers between stages, see pipeline_seconds
    dp                       an all-reduce of the gradients, behind the first stage's last backward while that lasts
    optimizer                AdamW reads 4 numbers and writes 3 a parameter: memory bandwidth

The grid is laid out as train.py does it: tp innermost, then stages, then pipelines, node after node. All devices are
alike, and so are all pipelines.
"""

import math
from typing import NamedTuple

from planning.known_devices import Cluster

EFFICIENCY = 0.7  # with it, published runs on A100 come out between 0.8 and 1.45 of what they measured: test_what_if.py
LINK_SHARE = 0.8  # of a link's nominal rate, what messages get
NODE_LATENCY = 5e-6  # seconds between two devices of a node
BUCKET = 25e6  # bytes, as in data_parallel.py
WIRE_BYTES = {None: 4, "float32": 4, "bfloat16": 2, "int8": 1}  # a number; the scales of int8's rows are left out
STATE_BYTES = 16  # a parameter: float32 weight, gradient and two moments


class Shape(NamedTuple):
    """The sizes of a Llama."""

    layers: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool

    @property
    def layer_weights(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 3 * self.hidden * self.width

    @property
    def head_weights(self) -> int:
        return self.hidden * self.vocab

    @property
    def parameters(self) -> int:
        return self.stage_parameters(self.layers, True, True)

    def stage_parameters(self, layers: int, is_first: bool, is_last: bool) -> int:
        ends = is_first + is_last - (self.tied and is_first and is_last)
        return layers * (self.layer_weights + 2 * self.hidden) + ends * self.head_weights + is_last * self.hidden


class Job(NamedTuple):
    """What is to be trained, on what, and how much of the data sheets' numbers it reaches. Bytes, seconds, FLOP/s."""

    shape: Shape
    cluster: Cluster
    seq_len: int
    global_batch: int  # samples a step
    float_bytes: int = 2  # of an activation
    schedule: str = "1f1b"
    wire_bytes: float = 2  # of a number between stages
    gradient_bytes: float = 4  # of a number of a gradient's all-reduce
    recompute: bool = False  # keep only the layers' inputs, compute their forward again in backward
    efficiency: float = EFFICIENCY
    memory: float = 72e9  # bytes of a device that may be used

    @property
    def peak(self) -> float:
        return self.cluster.device.bfloat16 if self.float_bytes == 2 else self.cluster.device.float32


class Grid(NamedTuple):
    dp: int
    pp: int
    tp: int
    micro_batch: int  # samples


class Prediction(NamedTuple):
    grid: Grid
    layers: list[int]  # of each stage
    seconds: dict[str, float]  # of a step: compute, tp (both of the average stage), bubble, dp, optimizer
    memory: float  # bytes, of the stage that needs most

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def all_reduce_seconds(num_bytes: float, members: int, in_node: int, cluster: Cluster) -> float:
    """A ring inside each node, and one across nodes for each of a node's members, with 1/in_node of the bytes.

    All devices of a node use its network at once. Rounds as of a tree, which is what is taken for many small messages.
    """
    nodes, device = members // in_node, cluster.device
    inside = 2 * (in_node - 1) / in_node * num_bytes / (device.node_link * LINK_SHARE)
    port = cluster.network * LINK_SHARE / cluster.per_node
    across = 2 * (nodes - 1) / nodes * num_bytes / in_node / port
    rounds = 2 * math.ceil(math.log2(in_node)) * NODE_LATENCY + 2 * math.ceil(math.log2(nodes)) * device.latency
    return inside + across + rounds


def saved_numbers(job: Job, grid: Grid) -> float:
    """Numbers a layer saves for the backward of one token: norms' input, 1/rms, normalized and scaled; q, k, v, the
    output and its logs; gate, silu, up and their product. Norms are whole on every tp rank."""
    shape = job.shape
    split = 2 * shape.head_dim * (shape.heads + shape.kv_heads) + shape.heads + 4 * shape.width
    return 2 * (3 * shape.hidden + 1) + split / grid.tp


def layer_seconds(job: Job, grid: Grid) -> tuple[float, float, float]:
    """Of one layer and micro-batch: forward, backward, and the part of both that tp's all-reduces take.

    Each saved number is written and read in forward, twice as many in backward. In bf16 a micro-batch casts the weights
    (6 bytes of each) and their gradients (6), and adds these in float32 (12).
    """
    shape, tokens = job.shape, grid.micro_batch * job.seq_len
    flops = 2 * tokens * (shape.layer_weights + job.seq_len * shape.heads * shape.head_dim) / grid.tp
    moved = 2 * tokens * saved_numbers(job, grid) * job.float_bytes
    weights, is_cast = shape.layer_weights / grid.tp, job.float_bytes == 2
    moved += 6 * is_cast * weights
    forward = flops / (job.peak * job.efficiency) + moved / job.cluster.device.memory_bandwidth
    backward = 2 * forward + 12 * weights / job.cluster.device.memory_bandwidth
    in_node = min(grid.tp, job.cluster.per_node)
    reduce = 2 * all_reduce_seconds(tokens * shape.hidden * job.float_bytes, grid.tp, in_node, job.cluster)
    again = job.recompute * (forward + reduce)
    return forward + reduce, backward + reduce + again, reduce * (2 + job.recompute)


def head_seconds(job: Job, grid: Grid) -> tuple[float, float]:
    """The projection to the vocabulary and the loss, whose logits are moved in float32: forward, backward."""
    tokens, weights = grid.micro_batch * job.seq_len, job.shape.head_weights / grid.tp
    flops, moved = 2 * tokens * weights, 2 * 12 * tokens * job.shape.vocab / grid.tp
    forward = flops / (job.peak * job.efficiency) + moved / job.cluster.device.memory_bandwidth
    return forward, 2 * forward + 12 * weights / job.cluster.device.memory_bandwidth


def split_layers(layers: int, pp: int, head: float) -> list[int]:
    """Layers a stage, such that the slowest stage is fastest; the last also has a head of `head` layers' work."""
    if pp == 1:
        return [layers]
    last = min(range(1, layers - pp + 2), key=lambda last: (max(-(-(layers - last) // (pp - 1)), last + head), -last))
    size, left_over = divmod(layers - last, pp - 1)
    return [size + (stage < left_over) for stage in range(pp - 1)] + [last]


def transfer_seconds(job: Job, grid: Grid) -> float:
    """Hidden states of a micro-batch from a stage to the next, averaged over a pipeline's boundaries."""
    if grid.pp == 1:
        return 0.0
    num_bytes = grid.micro_batch * job.seq_len * job.shape.hidden * job.wire_bytes
    cluster, device = job.cluster, job.cluster.device
    inside = num_bytes / (device.node_link * LINK_SHARE) + NODE_LATENCY
    across = num_bytes / (cluster.network * LINK_SHARE / cluster.per_node) + device.latency
    leaving = min(grid.pp - 1, -(-grid.pp * grid.tp // cluster.per_node) - 1)  # boundaries between nodes
    return (leaving * across + (grid.pp - 1 - leaving) * inside) / (grid.pp - 1)


def pipeline_seconds(stages: list[float], transfer: float, num_microbatches: int, schedule: str) -> float:
    """From the first forward to the last backward; `stages`: forward and backward of a micro-batch on each stage.

    The first micro-batch goes down and up the pipeline, the others follow at the pace of the slowest stage or, if that
    is slower, of a transfer. In 1F1B p of them at most are under way, so a round of p takes at least one journey down
    and up, and all but one of a round wait for their share of what that lasts longer: transfers, although in the
    background, are not free. For stages alike and no transfers this is (m + p - 1) (forward + backward).
    """
    p, slowest, others = len(stages), max(stages), num_microbatches - 1
    journey, stalls = sum(stages) + 2 * (p - 1) * transfer, 0.0
    if schedule == "afab":  # a forward is a third of the work; all transfers of one direction come after each other
        pace = max(slowest / 3, transfer) + max(slowest * 2 / 3, transfer)
    else:
        pace = max(slowest, transfer)
    if schedule == "1f1b" and p > 1:
        stalls = (others - -(-others // p)) * max(0.0, journey - p * pace) / (p - 1)
    return journey + others * pace + stalls


def gradient_seconds(job: Job, grid: Grid, layers: list[int], backward: float) -> float:
    """What is left of the first stage's all-reduces once its last backward, of `backward` seconds, has ended.

    At least the last bucket is, and in it the embedding. A tied embedding is summed with the last stages' too.
    """
    shape, pp = job.shape, grid.pp
    in_node = math.gcd(grid.dp, max(1, job.cluster.per_node // (grid.tp * pp)))
    embedding = shape.head_weights / grid.tp * job.gradient_bytes
    total = shape.stage_parameters(layers[0], True, pp == 1) / grid.tp * job.gradient_bytes
    first = all_reduce_seconds(total - embedding, grid.dp, in_node, job.cluster)
    last = all_reduce_seconds(embedding, grid.dp * (1 + (shape.tied and pp > 1)), in_node, job.cluster)
    last += first * min(1.0, max(0.0, BUCKET - embedding) / (total - embedding))
    return max(first + last - backward, last)


def memory_bytes(job: Job, grid: Grid, layers: list[int], num_microbatches: int) -> float:
    """Of the first or the last stage, whichever needs more: no other can. In bf16 each live micro-batch also keeps the
    weights it was multiplied with, cast from float32."""
    shape, tokens, needs = job.shape, grid.micro_batch * job.seq_len, []
    for stage in {0, grid.pp - 1}:
        is_last = stage == grid.pp - 1
        live = min(num_microbatches, grid.pp - stage) if job.schedule == "1f1b" else num_microbatches
        saved = tokens * saved_numbers(job, grid) * job.float_bytes
        saved += (job.float_bytes == 2) * 2 * shape.layer_weights / grid.tp
        kept = tokens * shape.hidden * job.float_bytes  # the input; also what a transfer has in its hands, both ways
        activations = live * layers[stage] * kept + saved if job.recompute else live * layers[stage] * saved
        if is_last:  # logits in float32, their softmax and their gradient
            activations += tokens * (3 * shape.hidden * job.float_bytes + 12 * shape.vocab / grid.tp)
        state = STATE_BYTES * shape.stage_parameters(layers[stage], stage == 0, is_last) / grid.tp
        needs.append(state + activations + 4 * (grid.pp > 1) * kept)
    return max(needs)


def predict(job: Job, grid: Grid) -> Prediction:
    m, pp = job.global_batch // (grid.dp * grid.micro_batch), grid.pp
    forward, backward, reduce = layer_seconds(job, grid)
    head = head_seconds(job, grid)
    layers = split_layers(job.shape.layers, pp, sum(head) / (forward + backward))
    stages = [count * (forward + backward) for count in layers]
    stages[-1] += sum(head)
    pipeline = pipeline_seconds(stages, transfer_seconds(job, grid), m, job.schedule)
    busy, tp = m * sum(stages) / pp, m * reduce * job.shape.layers / pp
    most = max(job.shape.stage_parameters(layers[stage], stage == 0, stage == pp - 1) for stage in (0, pp - 1))
    seconds = {
        "compute": busy - tp, "tp": tp, "bubble": pipeline - busy,
        "dp": gradient_seconds(job, grid, layers, layers[0] * backward + (pp == 1) * head[1]),
        "optimizer": 28 * most / grid.tp / job.cluster.device.memory_bandwidth,
    }
    return Prediction(grid, layers, seconds, memory_bytes(job, grid, layers, m))
