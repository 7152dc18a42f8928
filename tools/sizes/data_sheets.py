"""Machines that are not here, by name: `64xH100:8`, `3xRaspberryPi5:1@100mbit`, `1xRTX5070Ti+1xRTX4070@1gbit`.

    N x DEVICE [: devices per node] [+ more of them] [@ what a node's network carries, in each direction]

The numbers of a device are the peaks of its data sheet, dense (without sparsity); nobody reaches them. The content of a
cluster.json is made of them:

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
import pathlib
import re
import sys
from typing import NamedTuple

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "cluster"))
from ranks import course  # noqa: E402, F401  before step 9's modules

from planning.machines import MODEL, NUMBER_BYTES  # noqa: E402
from utils import UserError, load_config, number  # noqa: E402

GB, GBIT = 1e9, 1e9 / 8
ETHERNET, INFINIBAND = 2e-4, 1e-5  # seconds from process to process: over TCP at home, over RDMA in a data centre
EFFICIENCY = 0.7  # the share of a data sheet's FLOP/s that matrix products reach
LINK_SHARE = 0.8  # the share of a link's nominal rate that messages reach
NODE_LATENCY = 5e-6  # seconds between two devices of a node


class Device(NamedTuple):
    bfloat16: float | None  # FLOP/s of matrix products that accumulate in float32; None: it has no unit for them
    float32: float  # FLOP/s, without TF32, as torch does it by default
    memory: float  # bytes
    memory_bandwidth: float  # bytes/s
    node_link: float  # bytes/s to another device of the node, in one direction
    port: float  # bytes/s of the network, in one direction; a device's own in a data centre, else the node's
    latency: float  # seconds, over that network

    @property
    def is_gpu(self) -> bool:
        return self.bfloat16 is not None


# NVIDIA's data sheets of H100, H200, A100 (SXM) and L40S; NVLink there is the sum of both directions. Ports: the one
# ConnectX of each GPU in DGX H100, H200 and A100. H800: an H100 whose NVLink has 400 GB/s, the sum of both directions.
# GeForce: the architecture white papers; PCIe 4.0 or 5.0 x16.
# Raspberry Pi 5: 4 Cortex-A76 at 2.4 GHz, two 128-bit multiply-adds a cycle, 32-bit LPDDR4X-4267, the 8 GB model.
DEVICES = {
    "H100": Device(989e12, 67e12, 80 * GB, 3350 * GB, 450 * GB, 400 * GBIT, INFINIBAND),
    "H800": Device(989e12, 67e12, 80 * GB, 3350 * GB, 200 * GB, 400 * GBIT, INFINIBAND),
    "H200": Device(989e12, 67e12, 141 * GB, 4800 * GB, 450 * GB, 400 * GBIT, INFINIBAND),
    "A100": Device(312e12, 19.5e12, 80 * GB, 2039 * GB, 300 * GB, 200 * GBIT, INFINIBAND),
    "L40S": Device(362e12, 91.6e12, 48 * GB, 864 * GB, 32 * GB, 200 * GBIT, INFINIBAND),
    "RTX4090": Device(165e12, 82.6e12, 24 * GB, 1008 * GB, 32 * GB, 1 * GBIT, ETHERNET),
    "RTX3090": Device(71e12, 35.6e12, 24 * GB, 936 * GB, 32 * GB, 1 * GBIT, ETHERNET),
    "RTX5070Ti": Device(88e12, 43.9e12, 16 * GB, 896 * GB, 64 * GB, 1 * GBIT, ETHERNET),
    "RTX4070": Device(58e12, 29.1e12, 12 * GB, 504 * GB, 32 * GB, 1 * GBIT, ETHERNET),
    "RTX3070Ti": Device(43.5e12, 21.7e12, 8 * GB, 608 * GB, 32 * GB, 1 * GBIT, ETHERNET),
    "RaspberryPi5": Device(None, 0.154e12, 8 * GB, 17 * GB, 17 * GB, 1 * GBIT, ETHERNET),
}
GROUP = re.compile(r"(\d{1,6})x([A-Za-z]\w*)(?::(\d{1,6}))?")  # lists of more take long
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(bit|b)", re.IGNORECASE)


class Node(NamedTuple):
    """A machine with `count` devices of one kind. `network`: bytes/s of the whole node, in one direction."""

    name: str
    device: Device
    count: int
    network: float


plausible = number(float, lambda value: 1e-9 <= value <= 1e9, "a number from 1e-9 to 1e9")


def parse_rate(text: str) -> float:
    """'100mbit' -> 12.5e6 bytes/s; '450GB' -> 450e9."""
    if not (match := RATE.fullmatch(text)) or not 0 < float(match[1]) < 1e9:
        raise UserError(f"--cluster ...@{text}: write a rate as in 100mbit, 1gbit or 450GB, each of a second")
    return float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " ") / (8 if match[3].lower() == "bit" else 1)


def find_device(name: str, said: str) -> str:
    """Its name as DEVICES has it. `said`: the flag and its value. Raises UserError where it is unknown."""
    if known := [each for each in DEVICES if each.lower() == name.lower()]:
        return known[0]
    raise UserError(f"{said}: no {name!r} among {', '.join(DEVICES)}: choose the one that is most like it, and give "
                    "--peak_tflops and --device_memory")


def parse_nodes(spec: str) -> list[Node]:
    """What --cluster says, node by node. Raises UserError where it can't be read, or names an unknown device."""
    (groups, _, rate), nodes = spec.partition("@"), []
    for group in groups.split("+"):
        match = GROUP.fullmatch(group.strip())
        if not match or not int(match[1]) or not int(match[3] or 1):
            raise UserError(f"--cluster {spec!r}: write the number, the device and how many a node has, as in "
                            "64xH100:8 (up to 999999), or 3xRaspberryPi5:1@100mbit, with + between unlike ones")
        name, count = find_device(match[2], f"--cluster {spec!r}"), int(match[1])
        device, per_node = DEVICES[name], min(count, int(match[3] or 1))
        if count % per_node:
            raise UserError(f"--cluster {spec!r}: nodes have equally many devices and none may be left over, but "
                            f"this is {count} in nodes of {per_node}")
        ports = per_node if device.latency == INFINIBAND else 1
        network = parse_rate(rate) if rate else device.port * ports
        nodes += [Node(name, device, per_node, network)] * (count // per_node)
    return nodes


def add_device_flags(parser, title: str) -> None:
    """What read_nodes() reads besides --cluster."""
    group = parser.add_argument_group(title, "where they are left out, the data sheets count")
    group.add_argument("--peak_tflops", type=plausible, default=None, help="of a device, in this --dtype, dense")
    group.add_argument("--efficiency", type=float, default=EFFICIENCY, help="share of it that matrix products reach")
    group.add_argument("--device_memory", type=plausible, default=None, help="GB of a device")


def read_nodes(args) -> tuple[list[Node], str]:
    """The nodes, with what the flags say instead of the data sheets, and the dtype: auto is bfloat16 where all can."""
    nodes = parse_nodes(args.cluster)
    can_bfloat16 = all(node.device.bfloat16 for node in nodes)
    dtype = args.dtype if args.dtype not in (None, "auto") else "bfloat16" if can_bfloat16 else "float32"
    if not 1e-9 <= args.efficiency <= 1:
        raise UserError(f"--efficiency {args.efficiency}: a share of the peak is more than 0 and at most 1")
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"--dtype {dtype}: data sheets are read for bfloat16 and float32, use one of these")
    if dtype == "bfloat16" and not can_bfloat16 and not args.peak_tflops:
        raise UserError(f"--dtype {dtype}: not all of {args.cluster} have a unit for it: use float32, or give "
                        "--peak_tflops")
    changes = {name: value * unit for name, value, unit in (
        (dtype, args.peak_tflops, 1e12), ("memory", args.device_memory, 1e9)) if value}
    return [node._replace(device=node.device._replace(**changes)) for node in nodes], dtype


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

    def flops(self, seq_len: int, experts: int = 0, per_token: int = 1) -> int:
        """Of a token's forward and backward, as metrics.py of the steps counts for MFU: 6 for each weight that it
        multiplies, of experts those that it passes, and 12 T for each channel of the queries of a layer."""
        further = 3 * self.hidden * self.width * (per_token - 1) + self.hidden * experts if experts else 0
        weights = self.layers * (self.layer_weights + further) + self.hidden * self.vocab
        return 6 * weights + 12 * self.layers * self.heads * self.head_dim * seq_len

    def config(self) -> dict:
        """As in the config.json of a Llama."""
        return {"model_type": "llama", **dict(zip(MODEL, self)), "head_dim": self.head_dim,
                "max_position_embeddings": 8192}


# Llama 2 (Meta 2023), Llama 3.1 and 3.2 (Meta 2024)
PRESETS = {
    "llama-2-7b": Shape(4096, 11008, 32, 32, 32, 32000, False, 128),
    "llama-2-13b": Shape(5120, 13824, 40, 40, 40, 32000, False, 128),
    "llama-1b": Shape(2048, 8192, 16, 32, 8, 128256, True, 64),
    "llama-8b": Shape(4096, 14336, 32, 32, 8, 128256, False, 128),
    "llama-70b": Shape(8192, 28672, 80, 64, 8, 128256, False, 128),
    "llama-405b": Shape(16384, 53248, 126, 128, 8, 128256, False, 128),
}


def read_shape(name: str, args) -> Shape:
    """The sizes of a model, with what the flags say instead. Raises UserError where it has not those of a Llama."""
    heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
    is_preset, has_its_heads = name in PRESETS and not os.path.isdir(name), heads is None and kv_heads is None
    if is_preset and has_its_heads:
        return PRESETS[name]._replace(layers=args.num_hidden_layers or PRESETS[name].layers)
    config = load_config(name, num_hidden_layers=args.num_hidden_layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads)
    if missing := [name for name in MODEL if getattr(config, name, None) is None]:
        raise UserError(f"--model_name {name!r} has no {', '.join(missing)}: what_if.py counts what a Llama "
                        "multiplies, choose a model of that kind")
    if heads and config.hidden_size % heads:
        raise UserError(f"hidden_size={config.hidden_size} is not a multiple of --num_attention_heads {heads}: choose "
                        "one that divides it")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Shape(*(getattr(config, name) for name in MODEL), head_dim)


def kept_by_layer(shape: Shape, tp: int, number_bytes: int, is_gpu: bool) -> dict[str, float]:
    """Bytes that a layer of a Llama keeps of one token for its backward, by what they are.

    A norm keeps its input and 1/rms. On CUDA, backward normalizes the input once more. On a CPU the normalized input is
    kept, too, and both are float32, also where activations, of `number_bytes` each, are bfloat16.
    """
    norm = shape.hidden * (number_bytes if is_gpu else 2 * max(4, number_bytes)) + 4
    return {"two norms": 2 * norm, "what q, k, v and gate, up multiply": 2 * shape.hidden * number_bytes,
            "q, k, v, output; sums of softmax": (2 * shape.head_dim * (shape.heads + shape.kv_heads) * number_bytes
                                                 + 4 * shape.heads) / tp,
            "gate, silu(gate), up, their product": 4 * shape.width * number_bytes / tp}


class Costs:
    """What one machine, `tp_size` devices of a node, takes for each module of a Llama. Seconds, bytes."""

    def __init__(self, shape: Shape, node: Node, tp_size: int, seq_len: int, dtype: str, efficiency: float):
        self.shape, self.device, self.tp, self.seq_len = shape, node.device, tp_size, seq_len
        self.number_bytes = NUMBER_BYTES[dtype]
        self.kept = kept_by_layer(shape, tp_size, self.number_bytes, node.device.is_gpu)
        self.flops = (node.device.bfloat16 if dtype == "bfloat16" else node.device.float32) * efficiency

    def all_reduce(self, size: int) -> float:
        """Seconds of one all-reduce of a micro-batch's hidden states over the tp group."""
        num_bytes = size * self.seq_len * self.shape.hidden * self.number_bytes
        rounds = 2 * math.ceil(math.log2(self.tp)) * NODE_LATENCY
        return 2 * (self.tp - 1) / self.tp * num_bytes / (self.device.node_link * LINK_SHARE) + rounds

    def modules(self, size: int, recompute: bool = False) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of the embedding, each layer, the norm, and the projection with the loss.

        With `recompute`, who plans adds a forward to each backward. Of its two sums over tp the second one, which makes
        the layer's output, is not done again, so the backward here lacks one.
        In bfloat16 a layer also casts its weights and their gradients (6 bytes each). Logits are moved in float32.
        """
        shape, tokens, bandwidth = self.shape, size * self.seq_len, self.device.memory_bandwidth
        weights, head = shape.layer_weights / self.tp, shape.hidden * shape.vocab / self.tp
        flops = 2 * tokens * (shape.layer_weights + self.seq_len * shape.heads * shape.head_dim) / self.tp
        moved = 2 * tokens * sum(self.kept.values()) + 6 * (self.number_bytes == 2) * weights
        layer = flops / self.flops + moved / bandwidth
        last = 2 * tokens * head / self.flops + 24 * tokens * shape.vocab / self.tp / bandwidth
        reduce = 2 * self.all_reduce(size)
        forward = [0.0, *[layer + reduce] * shape.layers, 0.0, last]
        gradients = 12 / bandwidth  # per weight: its gradient is read, added and written in float32
        sums = reduce - recompute * self.all_reduce(size)
        backward = [0.0, *[2 * layer + sums + gradients * weights] * shape.layers, 0.0, 2 * last + gradients * head]
        return forward, backward

    def describe(self) -> list[dict]:
        """For each module its name, the parameters of a device, and the bytes that a sample leaves for backward."""
        shape, tokens, table = self.shape, self.seq_len, self.shape.hidden * self.shape.vocab / self.tp
        layer = {"parameters": shape.layer_weights / self.tp + 2 * shape.hidden,
                 "saved_bytes": tokens * sum(self.kept.values())}
        logits = 12 * shape.vocab / self.tp + shape.hidden * self.number_bytes + self.kept["two norms"] / 2
        return [{"name": "embedding", "parameters": table, "saved_bytes": 0.0},
                *({"name": f"decoder_layers.{i}", **layer} for i in range(shape.layers)),
                {"name": "final_norm", "parameters": shape.hidden, "saved_bytes": 0.0},
                {"name": "final_proj", "parameters": table, "saved_bytes": tokens * logits}]


def synthetic_cluster(shape: Shape, nodes: list[Node], tp_size: int, seq_len: int, dtype: str, sizes: list[int],
                      efficiency: float = EFFICIENCY, recompute: bool = False) -> dict:
    """The content of cluster.json: every tp_size devices of a node are a machine. `sizes`: samples of a micro-batch.

    Raises UserError where tp_size does not divide the devices of each node.
    """
    if uneven := [node.count for node in nodes if node.count % tp_size]:
        raise UserError(f"tp_size={tp_size} does not divide the {uneven[0]} devices of a node")
    machines, hosts, node_of = [], [], []
    for index, node in enumerate(nodes):
        costs = Costs(shape, node, tp_size, seq_len, dtype, efficiency)
        times = {str(size): costs.modules(size, recompute) for size in sizes}
        machine = {"free_memory": node.device.memory, "optimizer_seconds": 28 / node.device.memory_bandwidth,
                   "forward": {size: forward for size, (forward, _) in times.items()},
                   "backward": {size: backward for size, (_, backward) in times.items()}}
        machines += [machine] * (node.count // tp_size)
        hosts += [f"{node.name}-{index}"] * (node.count // tp_size)
        node_of += [index] * (node.count // tp_size)

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
