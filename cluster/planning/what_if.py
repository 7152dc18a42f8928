"""What would a cluster that is not here do? `plan.py --cluster 64xH100:8`: the best dp x pp x tp, from data sheets.

Every grid with dp pp tp = N devices goes through the formulas of grid_costs.py, with every micro-batch size; the table
has the best size of each. Of unlike devices the slowest counts, as pipelines are all cut alike: for machines
that are at hand, measure and plan instead.
"""

import os
from collections.abc import Iterator

from planning.grid_costs import EFFICIENCY, LINK_SHARE, WIRE_BYTES, Grid, Job, Prediction, Shape, predict
from planning.known_devices import Cluster, parse_cluster, parse_rate
from utils import load_config, to_readable_format

# Llama 3.2 and 3.1 (Meta 2024): layers, hidden, MLP width, heads, key/value heads, head size, vocabulary, tied.
PRESETS = {
    "llama-1b": (16, 2048, 8192, 32, 8, 64, 128256, True),
    "llama-8b": (32, 4096, 14336, 32, 8, 128, 128256, False),
    "llama-70b": (80, 8192, 28672, 64, 8, 128, 128256, False),
    "llama-405b": (126, 16384, 53248, 128, 8, 128, 128256, False),
}


def grids(job: Job, micro_batch: int | None) -> Iterator[Grid]:
    """All that are possible: tp divides heads and MLP and fills nodes evenly, each stage has a layer."""
    shape, size, per_node = job.shape, job.cluster.num_devices, job.cluster.per_node
    for tp in (tp for tp in range(1, min(size, shape.kv_heads) + 1) if size % tp == 0):
        if any(count % tp for count in (shape.heads, shape.kv_heads, shape.width)) or per_node % tp and tp % per_node:
            continue
        for pp in (pp for pp in range(1, min(shape.layers, size // tp) + 1) if size // tp % pp == 0):
            share, left_over = divmod(job.global_batch, dp := size // tp // pp)
            sizes = [micro_batch] if micro_batch else [2**k for k in range(share.bit_length())]
            yield from (Grid(dp, pp, tp, b) for b in sizes if not left_over and b <= share and share % b == 0)


def search(job: Job, micro_batch: int | None = None) -> list[Prediction]:
    """The best of each grid, fastest first; grids that don't fit come after all that do, the least needy first.

    Raises ValueError where there is no grid at all.
    """
    best: dict[tuple, Prediction] = {}
    for grid in grids(job, micro_batch):
        found = predict(job, grid)
        if grid[:3] not in best or rank(job, found) < rank(job, best[grid[:3]]):
            best[grid[:3]] = found
    if not best:
        of = f" in micro-batches of {micro_batch}" if micro_batch else ""
        raise ValueError(
            f"no dp x pp x tp = {job.cluster.num_devices} shares {job.global_batch} samples{of} and {job.shape.layers} "
            "layers: dp has to divide --global_batch, pp is at most the layers, tp divides heads and MLP width")
    return sorted(best.values(), key=lambda found: rank(job, found))


def rank(job: Job, found: Prediction) -> tuple[bool, float]:
    return (True, found.memory) if found.memory > job.memory else (False, found.step_seconds)


def add_flags(parser) -> None:
    """The flags that only --cluster has; what data sheets say, or this file assumes, where they are left out."""
    group = parser.add_argument_group("with --cluster", "8xDEVICE:4 is 8 of them, 4 a node; @100mbit a node's network; "
                                      f"--model_name also takes {', '.join(PRESETS)}")
    group.add_argument("--peak_tflops", type=float, default=None, help="of a device, in this --dtype, dense")
    group.add_argument("--efficiency", type=float, default=EFFICIENCY, help="share of it that matrix products reach")
    group.add_argument("--device_memory", type=float, default=None, help="GB of a device")
    group.add_argument("--intra_bandwidth", metavar="450GB", help="a second, between devices of a node, one direction")
    group.add_argument("--inter_bandwidth", metavar="400gbit", help="a second, of a node, one direction; as after @")
    group.add_argument("--latency", type=float, default=None, help="seconds from node to node")
    group.add_argument("--recompute", action="store_true",
                       help="layers keep their input only, and compute their forward again (train.py does not)")


def read_cluster(args) -> tuple[Cluster, str]:
    """The cluster, with what the flags say instead of the data sheet, and the dtype: auto is bfloat16 where it can."""
    cluster = parse_cluster(args.cluster)
    dtype = args.dtype if args.dtype != "auto" else "bfloat16" if cluster.device.bfloat16 else "float32"
    for flag in ("peak_tflops", "device_memory", "latency"):
        if (value := getattr(args, flag)) is not None and value <= 0:
            raise ValueError(f"--{flag} {value}: must be more than 0")
    if not 0 < args.efficiency <= 1:
        raise ValueError(f"--efficiency {args.efficiency}: a share of the peak is more than 0 and at most 1")
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"--dtype {dtype}: data sheets are read for bfloat16 and float32, use one of these")
    changes = {dtype: args.peak_tflops and args.peak_tflops * 1e12, "latency": args.latency,
               "memory": args.device_memory and args.device_memory * 1e9,
               "node_link": args.intra_bandwidth and parse_rate("--intra_bandwidth", args.intra_bandwidth)}
    device = cluster.device._replace(**{name: value for name, value in changes.items() if value})
    if getattr(device, dtype) is None:
        raise ValueError(f"--dtype {dtype}: {cluster.names} have no unit for it: use float32, or give --peak_tflops")
    network = parse_rate("--inter_bandwidth", args.inter_bandwidth) if args.inter_bandwidth else cluster.network
    return cluster._replace(device=device, network=network), dtype


def read_shape(args) -> Shape:
    heads, kv_heads = args.num_attention_heads, args.num_key_value_heads
    if args.model_name in PRESETS and not os.path.isdir(args.model_name) and heads is None and kv_heads is None:
        shape = Shape(*PRESETS[args.model_name])
        return shape._replace(layers=args.num_hidden_layers or shape.layers)
    config = load_config(args.model_name, num_hidden_layers=args.num_hidden_layers, num_attention_heads=heads,
                         num_key_value_heads=kv_heads)
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "vocab_size", "tie_word_embeddings")
    if missing := [name for name in names if getattr(config, name, None) is None]:
        raise ValueError(f"--model_name {args.model_name!r} has no {', '.join(missing)}: --cluster counts what a Llama "
                         "multiplies, choose a model of that kind")
    layers, hidden, width, heads, kv_heads, vocab, tied = (getattr(config, name) for name in names)
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    return Shape(layers, hidden, width, heads, kv_heads, head_dim, vocab, bool(tied))


def mfu(job: Job, found: Prediction) -> float:
    """Model FLOPs utilization (PaLM, Chowdhery et al. 2022, appendix B): 6N + 12 L (H hd) T FLOPs a token."""
    shape, tokens = job.shape, job.global_batch * job.seq_len
    flops = 6 * shape.parameters + 12 * shape.layers * shape.heads * shape.head_dim * job.seq_len
    return tokens * flops / (found.step_seconds * job.cluster.num_devices * job.peak)


def row(job: Job, found: Prediction) -> str:
    dp, pp, tp, size = found.grid
    tokens = to_readable_format(job.global_batch * job.seq_len / found.step_seconds)
    shares = "".join(f"{seconds / found.step_seconds:10.1%}" for seconds in found.seconds.values())
    return (f"{dp:5}{pp:4}{tp:4}{size:7}{job.global_batch // dp // size:6}{found.step_seconds:11.4g}{tokens:>10}"
            f"{mfu(job, found):7.1%}{found.memory / 1e9:8.3g}  {shares}")


def stages_as_text(layers: list[int]) -> str:
    """[9, 9, 8, 6] -> '9,9,8,6', as --pipelines takes it; long ones in short."""
    if len(layers) <= 16:
        return ",".join(map(str, layers))
    return ", ".join(f"{layers.count(n)} stages of {n}" for n in sorted(set(layers), reverse=True))


def report(job: Job, ranking: list[Prediction], top: int) -> str:
    """The table. Raises ValueError where nothing fits."""
    fitting = [found for found in ranking if found.memory <= job.memory]
    unfit, cluster = ranking[len(fitting):], job.cluster
    if not fitting:
        (dp, pp, tp, size), needed = unfit[0].grid, unfit[0].memory / 1e9
        raise ValueError(
            f"does not fit: dp {dp} x pp {pp} x tp {tp} with micro-batches of {size} needs least, {needed:.3g} GB a "
            f"device, {needed - job.memory / 1e9:.3g} GB more than may be used: take more devices"
            + ", a smaller --seq_len" + ", or --recompute" * (not job.recompute))
    port = f", {cluster.network / 1e9:.4g} GB/s a node between them" if cluster.num_devices > cluster.per_node else ""
    node = f", {cluster.device.node_link / 1e9:.4g} GB/s inside" if cluster.per_node > 1 else ""
    tokens = f"{job.global_batch} samples of {job.seq_len} tokens a step"
    lines = [
        f"{cluster.names}, nodes of {cluster.per_node}{node}{port}; of links {LINK_SHARE:.0%} is reached",
        f"{to_readable_format(job.shape.parameters)} parameters, {tokens}",
        f"{job.efficiency:.0%} of {job.peak / 1e12:.3g} TFLOP/s, {job.memory / 1e9:.3g} GB a device may be used",
        "", "   dp  pp  tp  micro  count     step s  tokens/s    MFU      GB  "
        + "".join(f"{name:>10}" for name in fitting[0].seconds)]
    lines += [row(job, found) for found in fitting[:top]]
    lines += ["", f"fastest: {stages_as_text(fitting[0].layers)} layers a stage"]
    for found in sorted(unfit, key=lambda found: found.step_seconds)[:1]:
        if found.step_seconds < fitting[0].step_seconds:
            dp, pp, tp, size = found.grid
            lines.append(f"does not fit: dp {dp} x pp {pp} x tp {tp}, micro-batches of {size}, would take "
                         f"{found.step_seconds:.4g} s but needs {(found.memory - job.memory) / 1e9:.3g} GB more")
    alone = search(job._replace(cluster=cluster.alone()))[0]
    if alone.memory <= job.memory and cluster.num_devices > 1:
        times = alone.step_seconds / fitting[0].step_seconds
        lines.append(f"one device alone: {alone.step_seconds:.4g} s a step; the {cluster.num_devices} together are "
                     f"{times:.3g} times as fast")
    return "\n".join(lines)


def main(args) -> None:
    """args: plan.py's flags. Raises ValueError where they can't be read, or where the model fits nowhere."""
    cluster, dtype = read_cluster(args)
    num_bytes = 2 if dtype == "bfloat16" else 4
    job = Job(read_shape(args), cluster, args.seq_len, args.global_batch, num_bytes, args.schedule,
              WIRE_BYTES[args.wire_dtype] if args.wire_dtype else num_bytes, WIRE_BYTES[args.gradient_wire_dtype],
              args.recompute, args.efficiency, cluster.device.memory * args.memory_fraction)
    print(report(job, search(job, args.micro_batch_size), args.top))
