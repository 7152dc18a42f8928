"""What other machines would do: plans for devices that are not here, by the planner and simulation of measured ones.

    python tools/what_if.py --cluster 64xH100:8 --model_name llama-8b      grids of them, the quickest step first
    python tools/what_if.py --cards 16+12+8 24 --model_name llama-2-7b     does LoRA fit on cards of so many GB?

--cluster reads data sheets. Of like devices, each grid dp x pp x tp is one pipeline, which is simulated, and dp
replicas of it, which sum their gradients. Of unlike devices, every tp_size that divides all nodes makes machines, for
which the planner searches.

--cards makes one layer, the embedding and the head of each model, with random weights, and measures their memory on the
CPU as cluster/plan.py does it. The planner then looks for pipelines over equally fast cards. It takes --memory_fraction
of a card less what CUDA and its libraries occupy. Without numbers or --model_name it makes a table of common ones.
"""

import argparse
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from sizes.data_sheets import (  # before the modules of cluster/, which it makes known
    EFFICIENCY, LINK_SHARE, PRESETS, Costs, Node, Shape, add_device_flags, link, read_nodes, read_shape,
    synthetic_cluster,
)
from plan import add_model_flags, add_search_flags
from planning.machines import Candidate, Cluster, Link, Pipeline, Setting, model_facts
from planning.plan_file import report
from planning.search import find_plans
from planning.shares import layers_by_speed
from planning.simulate import peak_memory, simulate
from ranks.memory import USABLE_MEMORY
from sizes.splits import check_batch
from utils import TINY_LLAMA, ArgumentParser, UserError, one_clear_error, positive_int
from utils import to_readable_format

CARDS = ("8", "12", "16", "24", "16+12+8", "24+24")
ON_CARDS = ("llama-1b", "llama-2-7b", "llama-8b", "llama-2-13b")
OF_CLUSTER = ("dtype", "global_batch", "micro_batch_size", "wire_dtype", "gradient_wire_dtype", "schedule",
              "recompute", "top", "peak_tflops", "efficiency", "device_memory")  # flags that --cards does not read
CUDA = 0.8  # GB that a process takes of a card before it has a model


class Job(NamedTuple):
    """What is to be trained on what. `memory_fraction`: of a device's memory that may be used."""

    shape: Shape
    nodes: list[Node]
    seq_len: int
    global_batch: int
    dtype: str
    setting: Setting
    efficiency: float = EFFICIENCY
    memory_fraction: float = USABLE_MEMORY

    @property
    def num_devices(self) -> int:
        return sum(node.count for node in self.nodes)

    def cluster(self, nodes: list[Node], tp_size: int, sizes: list[int]) -> Cluster:
        return Cluster(synthetic_cluster(self.shape, nodes, tp_size, self.seq_len, self.dtype, sizes, self.efficiency,
                                         self.setting.recompute))


class Grid(NamedTuple):
    """A grid, the layers of its stages, and seconds of a step by what they go to. `memory`: bytes of a device."""

    dp: int
    pp: int
    tp: int
    size: int
    layers: tuple[int, ...]
    seconds: dict[str, float]
    memory: float

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def tp_sizes(job: Job) -> list[int]:
    """Those that divide heads, key/value heads, the MLP's width and the devices of every node."""
    counts = [job.shape.heads, job.shape.kv_heads, job.shape.width, *(node.count for node in job.nodes)]
    return [tp for tp in range(1, min(counts) + 1) if not any(count % tp for count in counts)]


def sizes_of(job: Job, dp: int, wanted: int | None) -> list[int]:
    """Samples of a micro-batch by which dp pipelines share the global batch evenly."""
    share, left_over = divmod(job.global_batch, dp)
    sizes = [wanted] if wanted else [2**k for k in range(share.bit_length())]
    return [] if left_over else [size for size in sizes if size <= share and share % size == 0]


def grids(job: Job, size: int | None) -> Iterator[Grid]:
    """Every grid of like devices with its best micro-batch size: one that fits, if there is one, the quickest."""
    for tp in tp_sizes(job):
        machines = job.num_devices // tp
        for pp in (pp for pp in range(1, min(job.shape.layers, machines) + 1) if machines % pp == 0):
            found = [simulate_grid(job, machines // pp, pp, tp, size) for size in sizes_of(job, machines // pp, size)]
            if found:
                yield min(found, key=lambda grid: rank(job, grid))


def rank(job: Job, grid: Grid) -> tuple[bool, float]:
    """Grids that fit come first, the quickest of them before the others. Of the rest, the least needy."""
    fits = grid.memory <= job.memory_fraction * job.nodes[0].device.memory
    return (False, grid.step_seconds) if fits else (True, grid.memory)


def simulate_grid(job: Job, dp: int, pp: int, tp: int, size: int) -> Grid:
    """One pipeline of `pp` machines, simulated. Its time grows by the same amount with each further micro-batch once
    there are a few for each stage, so no more than that are simulated."""
    node = job.nodes[0]
    num_nodes = -(-pp * tp // node.count)
    cluster = job.cluster([node] * num_nodes, tp, [size])
    machines, m = tuple(range(pp)), job.global_batch // dp // size
    stages = [cluster.layer_seconds(rank, size, job.setting.kinds) for rank in machines]
    layers = tuple(layers_by_speed(cluster.num_layers, stages))
    together = max(1, node.count // (pp * tp))  # members of a dp group that share a node, and so its network
    between = link(node, node, dp <= together)
    between["bandwidth"] = min(node.device.node_link * LINK_SHARE, between["bandwidth"] * together)
    between["latency"] *= math.log2(dp) / max(dp - 1, 1)  # many replicas sum in rounds of a tree, not of a ring

    def run(number: int):
        candidate = Candidate((Pipeline(machines, layers, number),), size, dp, Link(**between))
        return simulate(cluster, candidate, job.setting)

    few, more = 2 * pp, 4 * pp
    result = run(min(m, more))
    end = result.pipelines_end
    if m > more:
        end += (m - more) * (end - run(few).pipelines_end) / (more - few)
    stages = cluster.stages(layers)
    busy = m * sum(cluster.seconds(s, size, stage, job.setting.kinds) for s, stage in enumerate(stages)) / pp
    optimizer = sum(cluster.optimizer_seconds(s, stage) for s, stage in enumerate(stages)) / pp
    reduces = m * job.shape.layers / pp * Costs(job.shape, node, tp, job.seq_len, job.dtype, 1).all_reduce(size)
    reduces *= 5 if job.setting.recompute else 4  # a layer's last sum is not computed again: see splits.py
    seconds = {"compute": busy - reduces, "tp": reduces, "bubble": end - busy - optimizer,
               "dp": result.step_seconds - result.pipelines_end, "optimizer": optimizer}
    memory = max(peak_memory(cluster, Pipeline(machines, layers, m), size, job.setting))
    return Grid(dp, pp, tp, size, layers, seconds, memory)


def mfu(job: Job, step_seconds: float) -> float:
    """Model FLOPs utilization, of what all devices do by their data sheets."""
    peak = sum(node.count * (node.device.bfloat16 if job.dtype == "bfloat16" else node.device.float32)
               for node in job.nodes)
    return job.global_batch * job.seq_len * job.shape.flops(job.seq_len) / (step_seconds * peak)


def table(job: Job, found: list[Grid], top: int) -> str:
    """The grids that fit, quickest first. Raises UserError where none does, or where there is no grid at all."""
    if not found:
        raise UserError(f"no dp x pp x tp = {job.num_devices} shares {job.global_batch} samples and "
                        f"{job.shape.layers} layers: dp has to divide --global_batch, pp is at most the layers, tp "
                        "divides the heads, the MLP's width and the devices of a node")
    found, memory = sorted(found, key=lambda grid: rank(job, grid)), job.memory_fraction * job.nodes[0].device.memory
    fitting = [grid for grid in found if not rank(job, grid)[0]]
    if not fitting:
        dp, pp, tp, size, *_, needed = found[0]
        recompute = "" if job.setting.recompute else "use --recompute, "
        raise UserError(f"does not fit: dp {dp} x pp {pp} x tp {tp} with micro-batches of {size} needs least, "
                        f"{needed / 1e9:.3g} GB a device, {(needed - memory) / 1e9:.3g} GB more than may be used: "
                        f"{recompute}take more devices, or a smaller --seq_len")
    lines = ["   dp  pp  tp  micro  count     step s  tokens/s    MFU      GB  "
             + "".join(f"{name:>10}" for name in fitting[0].seconds)]
    for dp, pp, tp, size, _, seconds, needed in fitting[:top]:
        step, tokens = sum(seconds.values()), job.global_batch * job.seq_len
        shares = "".join(f"{max(part, 0.0) / step:10.1%}" for part in seconds.values())
        lines.append(f"{dp:5}{pp:4}{tp:4}{size:7}{job.global_batch // dp // size:6}{step:11.4g}"
                     f"{to_readable_format(tokens / step):>10}{mfu(job, step):7.1%}{needed / 1e9:8.3g}  {shares}")
    lines += ["", f"layers of the fastest: {','.join(map(str, fitting[0].layers))}"]
    return "\n".join(lines)


def unlike(job: Job, size: int | None, top: int) -> str:
    """The planner's report for each tp_size, the best first. Raises UserError where no plan fits."""
    found, errors = [], []
    for tp in tp_sizes(job):
        cluster = job.cluster(job.nodes, tp, sizes_of(job, 1, size)[:6])
        try:
            plans = find_plans(cluster, job.global_batch, job.setting, None, job.memory_fraction)
            found.append((plans.best[0].step_seconds, tp, report(cluster, plans, top)))
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return "\n".join(f"tp {tp}, {mfu(job, seconds):.1%} MFU of the best plan\n{text}"
                     for seconds, tp, text in sorted(found))


def what_if(args) -> str:
    """What --cluster prints. Raises UserError where the flags can't be read."""
    size, *others = args.micro_batch_size or [None]
    if others:
        raise UserError("--cluster takes one --micro_batch_size, or none")
    check_batch(args.global_batch or 32, size or 1)
    nodes, dtype = read_nodes(args)
    setting = Setting("1f1b" if args.schedule == "auto" else args.schedule, args.wire_dtype, args.gradient_wire_dtype,
                      args.recompute)
    job = Job(read_shape(args.model_name or TINY_LLAMA, args), nodes, args.seq_len or 128, args.global_batch or 32,
              dtype, setting, args.efficiency, args.memory_fraction)
    head = (f"{args.cluster}: {job.num_devices} devices in {len(nodes)} nodes, {dtype}; {LINK_SHARE:.0%} of links and "
            f"{args.efficiency:.0%} of FLOP/s are reached\n{to_readable_format(job.shape.parameters)} parameters, "
            f"{job.global_batch} samples of {job.seq_len} tokens a step; {args.memory_fraction:.0%} of the memory may "
            f"be used{'; --recompute' if setting.recompute else ''}\n\n")
    if len(set(nodes)) == 1:
        return head + table(job, list(grids(job, size)), args.top)
    return head + unlike(job, size, args.top)


def measure_modules(name: str, shape: Shape, seq_len: int, lora_rank: int, base_bits: int | None = None) -> dict:
    """The content of cluster.json for a Llama of this shape with adapters, with no machines yet."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from planning.profiler import LayerProfiler
    from models.lora import ALL, Lora
    from models.loss import mean_cross_entropy

    config = LlamaConfig(**{**shape.config(), "max_position_embeddings": max(4096, seq_len)})
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    flags = argparse.Namespace(lora_rank=lora_rank, lora_alpha=2 * lora_rank, lora_dropout=0.0, lora_targets=ALL,
                               base_bits=base_bits, seed=0, model_name=name)
    profiler = LayerProfiler(model, seq_len, torch.bfloat16, torch.device("cpu"), Lora(flags, model, torch.bfloat16),
                       mean_cross_entropy)
    profiler.facts = profiler.measure_memory(math.inf)
    return {"model_name": name, "model": model_facts(config), "seq_len": seq_len, **profiler.dtypes(), "flags": {},
            "modules": profiler.modules()}


def on_cards(modules: dict, cards: str, memory_fraction: float) -> str:
    """Whether micro-batches of one sample can be trained on these cards, and what each card holds."""
    sizes = [float(card) for card in cards.split("+")]
    seconds = {"1": [0.01] * len(modules["modules"])}  # equally fast, on links of 1 Gbit/s
    machines = [{"free_memory": (size - CUDA) * 1e9, "optimizer_seconds": 1e-10, "forward": seconds,
                 "backward": seconds} for size in sizes]
    links = [[None if i == j else {"latency": 1e-4, "bandwidth": 1.25e8} for j in range(len(sizes))]
             for i in range(len(sizes))]
    cluster = Cluster({**modules, "hosts": [f"{size:g} GB" for size in sizes], "machines": machines, "links": links})
    try:
        best = find_plans(cluster, 4 * len(sizes), Setting(), [1], memory_fraction, may_recompute=True).best[0]
    except UserError:
        return "no"
    word, peaks = "with --recompute" if best.setting.recompute else "yes", best.peak_memory
    if len(sizes) == 1:
        return f"{word}: {peaks[0] / 1e9:.1f} GB"
    places = [f"{layers} layers, {peaks[rank] / 1e9:.1f} GB on the card of {sizes[rank]:g}"
              for pipeline in best.candidate.pipelines for rank, layers in zip(pipeline.machines, pipeline.layers)]
    return f"{word}: " + "; ".join(places)


def cards(text: str) -> str:
    """The type of --cards."""
    if not re.fullmatch(r"\d{1,4}(\.\d+)?(\+\d{1,4}(\.\d+)?)*", text) or min(map(float, text.split("+"))) <= CUDA:
        raise argparse.ArgumentTypeError(f"write the GB of each card, as in 16+12+8, more than the {CUDA} that CUDA "
                                         f"takes, and below 10000, got {text!r}")
    return text


def parse_args(argv: list[str] | None = None):
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", metavar="64xH100:8", help="8xDEVICE:4 is 8 of them, 4 in a node; unlike ones are "
                        "added as in 1xRTX4090+2xRTX3090, and @100mbit is a node's network")
    parser.add_argument("--cards", nargs="*", type=cards, metavar="16+12+8", help="GB of each card")
    add_model_flags(parser, f"a directory with a config.json, a Hub id, or one of {', '.join(PRESETS)}")
    add_search_flags(parser)
    add_device_flags(parser, "with --cluster")
    parser.add_argument("--lora_rank", type=positive_int, default=16, help="with --cards (16)")
    parser.add_argument("--base_bits", type=int, choices=[4], help="with --cards: a frozen base in 4 bits")
    args = parser.parse_args(argv)
    if (args.cluster is None) == (args.cards is None):
        raise UserError("say which machines: --cluster 64xH100:8, or --cards 16+12+8; one of the two")
    if args.cluster is not None and (args.lora_rank != 16 or args.base_bits):
        raise UserError("--lora_rank and --base_bits are for --cards: --cluster trains all weights, leave them out")
    for name in OF_CLUSTER if args.cluster is None else ():
        if getattr(args, name) != parser.get_default(name):
            raise UserError(f"--{name} is for --cluster: --cards asks for memory alone, leave it out")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.cluster is not None:
        print(what_if(args))
        return
    seq_len = args.seq_len or 1024
    for name in [args.model_name] if args.model_name else ON_CARDS:
        modules = measure_modules(name, read_shape(name, args), seq_len, args.lora_rank, args.base_bits)
        bits = f", base in {args.base_bits} bits" if args.base_bits else ""
        print(f"{name}, rank {args.lora_rank}{bits}, micro-batches of one sample of {seq_len} tokens", flush=True)
        for cards in args.cards or CARDS:
            print(f"    {cards:>8} GB  {on_cards(modules, cards, args.memory_fraction)}", flush=True)


if __name__ == "__main__":
    with one_clear_error():
        main()
