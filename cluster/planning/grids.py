"""`plan.py --cluster`: the best plans for a cluster that is not here, by the planner and simulation of measured ones.

Of like devices, each grid dp x pp x tp is one pipeline, which is simulated, and dp replicas of it, which sum their
gradients. Of unlike devices, every tp_size that divides all nodes makes machines, for which the planner searches.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from planning.devices import Node, parse_nodes, parse_rate
from planning.machines import Cluster, Link
from planning.pipeline_simulation import Pipeline, Setting, optimizer_seconds
from planning.planner import find_plans
from planning.report import report
from planning.shares import shares_by_speed
from planning.simulation import Candidate, peak_memory, simulate
from planning.synthetic import EFFICIENCY, LINK_SHARE, PRESETS, Costs, Shape, link, read_shape, synthetic_cluster
from utils import UserError, to_readable_format


class Job(NamedTuple):
    """What is to be trained on what. `memory_fraction`: of a device's memory that may be used."""

    shape: Shape
    nodes: list[Node]
    seq_len: int
    global_batch: int
    dtype: str
    setting: Setting
    efficiency: float = EFFICIENCY
    memory_fraction: float = 0.9

    @property
    def num_devices(self) -> int:
        return sum(node.count for node in self.nodes)

    @property
    def flops(self) -> float:
        """Of all devices, by their data sheets."""
        return sum(node.count * (node.device.bfloat16 if self.dtype == "bfloat16" else node.device.float32)
                   for node in self.nodes)

    def cluster(self, nodes: list[Node], tp_size: int, sizes: list[int]) -> Cluster:
        return Cluster(synthetic_cluster(self.shape, nodes, tp_size, self.seq_len, self.dtype, sizes, self.efficiency))


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
    each, besides = cluster.layer_seconds(machines, size, job.setting.kinds)
    layers = tuple(shares_by_speed(cluster.num_layers, each, besides=besides))
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
    optimizer = sum(optimizer_seconds(cluster, s, stage) for s, stage in enumerate(stages)) / pp
    reduces = m * job.shape.layers / pp * Costs(job.shape, node, tp, job.seq_len, job.dtype, 1).all_reduce(size)
    reduces *= 6 if job.setting.recompute else 4
    seconds = {"compute": busy - reduces, "tp": reduces, "bubble": end - busy - optimizer,
               "dp": result.step_seconds - result.pipelines_end, "optimizer": optimizer}
    memory = max(peak_memory(cluster, Pipeline(machines, layers, m), size, job.setting))
    return Grid(dp, pp, tp, size, layers, seconds, memory)


def mfu(job: Job, step_seconds: float) -> float:
    """Model FLOPs utilization (PaLM, Chowdhery et al. 2022, appendix B): 6N + 12 L (H hd) T FLOPs per token."""
    shape, tokens = job.shape, job.global_batch * job.seq_len
    flops = 6 * shape.parameters + 12 * shape.layers * shape.heads * shape.head_dim * job.seq_len
    return tokens * flops / (step_seconds * job.flops)


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
            found.append((plans.best[0].result.step_seconds, tp, report(cluster, plans, top)))
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return "\n".join(f"tp {tp}, {mfu(job, seconds):.1%} MFU of the best plan\n{text}"
                     for seconds, tp, text in sorted(found))


def add_flags(parser) -> None:
    """The flags that only --cluster has. Where they are left out, the data sheets count."""
    group = parser.add_argument_group("with --cluster", "8xDEVICE:4 is 8 of them, 4 in a node; @100mbit is a node's "
                                      f"network; --model_name also takes {', '.join(PRESETS)}")
    group.add_argument("--peak_tflops", type=float, default=None, help="of a device, in this --dtype, dense")
    group.add_argument("--efficiency", type=float, default=EFFICIENCY, help="share of it that matrix products reach")
    group.add_argument("--device_memory", type=float, default=None, help="GB of a device")
    group.add_argument("--intra_bandwidth", metavar="450GB", help="a second, between devices of a node, one direction")
    group.add_argument("--inter_bandwidth", metavar="400gbit", help="a second, of a node, one direction; as after @")
    group.add_argument("--latency", type=float, default=None, help="seconds from node to node")


def read_nodes(args) -> tuple[list[Node], str]:
    """The nodes, with what the flags say instead of the data sheets, and the dtype: auto is bfloat16 where all can."""
    nodes = parse_nodes(args.cluster)
    can_bfloat16 = all(node.device.bfloat16 for node in nodes)
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if can_bfloat16 else "float32"
    for flag in ("peak_tflops", "device_memory", "latency"):
        if (value := getattr(args, flag)) is not None and value <= 0:
            raise UserError(f"--{flag} {value}: must be more than 0")
    if not 0 < args.efficiency <= 1:
        raise UserError(f"--efficiency {args.efficiency}: a share of the peak is more than 0 and at most 1")
    if dtype not in ("bfloat16", "float32"):
        raise UserError(f"--dtype {dtype}: data sheets are read for bfloat16 and float32, use one of these")
    if dtype == "bfloat16" and not can_bfloat16 and not args.peak_tflops:
        raise UserError(f"--dtype {dtype}: not all of {args.cluster} have a unit for it: use float32, or give "
                        "--peak_tflops")
    changes = {dtype: args.peak_tflops and args.peak_tflops * 1e12, "latency": args.latency,
               "memory": args.device_memory and args.device_memory * 1e9,
               "node_link": args.intra_bandwidth and parse_rate("--intra_bandwidth", args.intra_bandwidth)}
    changes = {name: value for name, value in changes.items() if value}
    network = args.inter_bandwidth and parse_rate("--inter_bandwidth", args.inter_bandwidth)
    return [node._replace(device=node.device._replace(**changes), network=network or node.network)
            for node in nodes], dtype


def what_if(args, setting: Setting) -> str:
    """What `plan.py --cluster` prints. `args` are its flags. Raises UserError where they can't be read."""
    nodes, dtype = read_nodes(args)
    job = Job(read_shape(args), nodes, args.seq_len, args.global_batch or 32, dtype, setting, args.efficiency,
              args.memory_fraction)
    size = args.micro_batch_size[0] if args.micro_batch_size else None
    head = (f"{args.cluster}: {job.num_devices} devices in {len(nodes)} nodes, {dtype}; {LINK_SHARE:.0%} of links and "
            f"{args.efficiency:.0%} of FLOP/s are reached\n{to_readable_format(job.shape.parameters)} parameters, "
            f"{job.global_batch} samples of {args.seq_len} tokens a step; {args.memory_fraction:.0%} of the memory may "
            f"be used{'; --recompute' if setting.recompute else ''}\n\n")
    if len(set(nodes)) == 1:
        return head + table(job, list(grids(job, size)), args.top)
    return head + unlike(job, size, args.top)
