"""The content of a cluster.json for machines that are not here, from their data sheets.

    a module, a micro-batch   FLOPs / (peak x efficiency)  +  bytes that weights and activations move / memory bandwidth
                              forward 2 FLOPs per weight and token, and causal attention; backward twice that
    tensor parallelism        a machine is then tp_size devices of one node. Its modules take 1/tp_size of the time, and
                              four all-reduces per layer of the hidden states, which nothing hides
    optimizer                 AdamW reads 4 numbers and writes 3 per parameter: memory bandwidth
    links                     inside a node its bus; between nodes the node's network, shared by its devices

What it leaves out: how efficiency depends on the sizes of matrices, launches of small kernels, Python, data loading.
"""

import math
import os
from typing import NamedTuple

from planning.devices import Node
from planning.machines import MODEL, NUMBER_BYTES
from utils import UserError, load_config

EFFICIENCY = 0.7  # the share of a data sheet's FLOP/s that matrix products reach
LINK_SHARE = 0.8  # the share of a link's nominal rate that messages reach
NODE_LATENCY = 5e-6  # seconds between two devices of a node


class Shape(NamedTuple):
    """The sizes of a Llama, in the order of MODEL."""

    hidden: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool
    head_dim: int

    @property
    def layer_weights(self) -> int:
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 3 * self.hidden * self.width

    @property
    def parameters(self) -> int:
        ends = (2 - self.tied) * self.hidden * self.vocab + self.hidden
        return self.layers * (self.layer_weights + 2 * self.hidden) + ends


# Llama 3.2 and 3.1 (Meta 2024)
PRESETS = {
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 128256, True, 64),
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256, False, 128),
    "llama-70b": Shape(8192, 28672, 80, 64, 8, 128256, False, 128),
    "llama-405b": Shape(16384, 53248, 126, 128, 8, 128256, False, 128),
}


def read_shape(args) -> Shape:
    """The sizes of --model_name. Raises UserError for a model that has none of a Llama."""
    heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
    if args.model_name in PRESETS and not os.path.isdir(args.model_name) and heads is None and kv_heads is None:
        shape = PRESETS[args.model_name]
        return shape._replace(layers=args.num_hidden_layers or shape.layers)
    config = load_config(args.model_name, num_hidden_layers=args.num_hidden_layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads)
    if missing := [name for name in MODEL if getattr(config, name, None) is None]:
        raise UserError(f"--model_name {args.model_name!r} has no {', '.join(missing)}: --cluster counts what a Llama "
                        "multiplies, choose a model of that kind")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(*(getattr(config, name) for name in MODEL), head_dim)


class Costs:
    """What one machine, `tp_size` devices of a node, takes for each module of a Llama. Seconds, bytes."""

    def __init__(self, shape: Shape, node: Node, tp_size: int, seq_len: int, dtype: str, efficiency: float):
        self.shape, self.device, self.tp, self.seq_len = shape, node.device, tp_size, seq_len
        self.number_bytes = NUMBER_BYTES[dtype]
        self.flops = (node.device.bfloat16 if dtype == "bfloat16" else node.device.float32) * efficiency

    def saved_numbers(self) -> float:
        """Numbers that a layer saves for the backward of one token: the input of the norms, 1/rms, normalized and
        scaled; q, k, v, the attention's output and its logs; gate, silu, up and their product."""
        shape = self.shape
        split = 2 * shape.head_dim * (shape.heads + shape.kv_heads) + shape.heads + 4 * shape.width
        return 2 * (3 * shape.hidden + 1) + split / self.tp

    def all_reduce(self, size: int) -> float:
        """Seconds of one all-reduce of a micro-batch's hidden states over the tp group."""
        num_bytes = size * self.seq_len * self.shape.hidden * self.number_bytes
        rounds = 2 * math.ceil(math.log2(self.tp)) * NODE_LATENCY
        return 2 * (self.tp - 1) / self.tp * num_bytes / (self.device.node_link * LINK_SHARE) + rounds

    def modules(self, size: int) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of the embedding, each layer, the norm, and the projection with the loss.

        In bfloat16 a layer also casts its weights and their gradients (6 bytes each). Logits are moved in float32.
        """
        shape, tokens, bandwidth = self.shape, size * self.seq_len, self.device.memory_bandwidth
        weights, head = shape.layer_weights / self.tp, shape.hidden * shape.vocab / self.tp
        flops = 2 * tokens * (shape.layer_weights + self.seq_len * shape.heads * shape.head_dim) / self.tp
        moved = 2 * tokens * self.saved_numbers() * self.number_bytes + 6 * (self.number_bytes == 2) * weights
        layer = flops / self.flops + moved / bandwidth
        last = 2 * tokens * head / self.flops + 24 * tokens * shape.vocab / self.tp / bandwidth
        reduce = 2 * self.all_reduce(size)
        forward = [0.0, *[layer + reduce] * shape.layers, 0.0, last]
        gradients = 12 / bandwidth  # per weight: its gradient is read, added and written in float32
        backward = [0.0, *[2 * layer + reduce + gradients * weights] * shape.layers, 0.0, 2 * last + gradients * head]
        return forward, backward

    def describe(self) -> list[dict]:
        """For each module its name, the parameters of a device, and the bytes that a sample leaves for backward."""
        shape, tokens, table = self.shape, self.seq_len, self.shape.hidden * self.shape.vocab / self.tp
        layer = {"parameters": shape.layer_weights / self.tp + 2 * shape.hidden,
                 "saved_bytes": tokens * self.saved_numbers() * self.number_bytes}
        logits = tokens * (3 * shape.hidden * self.number_bytes + 12 * shape.vocab / self.tp)  # and their softmax
        return [{"name": "embedding", "parameters": table, "saved_bytes": 0.0},
                *({"name": f"decoder_layers.{i}", **layer} for i in range(shape.layers)),
                {"name": "final_norm", "parameters": shape.hidden, "saved_bytes": 0.0},
                {"name": "final_proj", "parameters": table, "saved_bytes": logits}]


def synthetic_cluster(shape: Shape, nodes: list[Node], tp_size: int, seq_len: int, dtype: str, sizes: list[int],
                      efficiency: float = EFFICIENCY) -> dict:
    """The content of cluster.json: every tp_size devices of a node are a machine. `sizes`: samples of a micro-batch.

    Raises UserError where tp_size does not divide the devices of each node.
    """
    if uneven := [node.count for node in nodes if node.count % tp_size]:
        raise UserError(f"tp_size={tp_size} does not divide the {uneven[0]} devices of a node")
    machines, hosts, node_of = [], [], []
    for number, node in enumerate(nodes):
        costs = Costs(shape, node, tp_size, seq_len, dtype, efficiency)
        times = {str(size): costs.modules(size) for size in sizes}
        machine = {"free_memory": node.device.memory, "optimizer_seconds": 28 / node.device.memory_bandwidth,
                   "forward": {size: forward for size, (forward, _) in times.items()},
                   "backward": {size: backward for size, (_, backward) in times.items()}}
        machines += [machine] * (node.count // tp_size)
        hosts += [f"{node.name}-{number}"] * (node.count // tp_size)
        node_of += [number] * (node.count // tp_size)

    links = [[None if i == j else link(nodes[a], nodes[b], a == b) for j, b in enumerate(node_of)]
             for i, a in enumerate(node_of)]
    return {"model_name": "synthetic", "seq_len": seq_len, "dtype": dtype, "flags": {}, "hosts": hosts,
            "model": dict(zip(MODEL, shape)), "modules": costs.describe(), "machines": machines, "links": links}


def link(a: Node, b: Node, is_inside: bool) -> dict[str, float]:
    """Between a device of each node. All devices of a node use its network at once."""
    if is_inside:
        return {"latency": NODE_LATENCY, "bandwidth": a.device.node_link * LINK_SHARE}
    return {"latency": max(a.device.latency, b.device.latency),
            "bandwidth": min(a.network / a.count, b.network / b.count) * LINK_SHARE}
