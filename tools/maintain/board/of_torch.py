"""PyTorch's own parts: DDP, FSDP2 and HSDP, DTensor's styles, pipeline schedules, optimizers over shards."""

from rows import LENGTH, STEPS, VOCABULARY, Row, Watch, join, loop, micro_batches, rank, shake, tokens, world

NEEDS, SHOWN = ("torch==2.13.0", "numpy==2.4.6"), ()


def model_of(row):
    """A decoder of two layers; `kind` of the options gives it other parts."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(32), nn.RMSNorm(32)
            self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
            self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            h = self.norm1(x)
            q, k, v = (each(h).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
            x = x + self.o(
                nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            )
            h = self.norm2(x)
            return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.position = nn.Embedding(VOCABULARY, 32), nn.Embedding(LENGTH, 32)
            self.layers = nn.ModuleDict({str(i): Block() for i in range(4)})
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)
            if row.options.get("kind") == "tied":
                self.head.weight = self.embedding.weight

        def forward(self, x):
            if self.embedding is not None:
                x = self.embedding(x) + self.position.weight[: x.shape[1]]
            for layer in self.layers.values():
                x = layer(x)
            return x if self.head is None else self.head(self.norm(x))

    torch.manual_seed(0)
    return shake(Model())


def loss_of(model, ids):
    return cross_entropy(model(ids)[:, :-1], ids[:, 1:])


def cross_entropy(logits, targets):
    import torch

    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def optimizer_of(row, model):
    import torch

    name, *_ = row.options.get("optimizer", ("AdamW",))
    options = dict(row.options.get("optimizer", ("AdamW", dict(foreach=False)))[1])
    params = [param for param in model.parameters() if name != "Muon" or param.ndim == 2]
    return getattr(torch.optim, name)(params, lr=1e-3, **options)


def clip_of(row):
    import torch

    def clip(model):
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=row.options.get("foreach"))
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return clip if row.options.get("clip") else None


def ddp(row, folder):
    import torch

    model, options = model_of(row), dict(row.options.get("ddp", {}))
    if world() > 1:
        join()
        model = torch.nn.parallel.DistributedDataParallel(model, **options)

    def before(i, is_last):
        if world() > 1 and row.options.get("no_sync"):
            model.require_backward_grad_sync = is_last
    if row.options.get("compiled"):
        model = torch.compile(model, backend="aot_eager")
    optimizer = None
    if row.options.get("zero") and world() > 1:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    loop(row, model, folder, loss_of, data_rank=rank(), before=before, clip=clip_of(row), optimizer=optimizer)


def fsdp2(row, folder):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, before = model_of(row), None
    if world() > 1:
        join()
        shape = row.options.get("shape", (world(),))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape):])
        options = dict(mesh=mesh, reshard_after_forward=row.options.get("reshard", True))
        if "reduce" in row.options:
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=getattr(torch, row.options["reduce"]))
        for layer in model.layers.values():
            fully_shard(layer, **options)
        fully_shard(model, **options)
        if row.options.get("no_sync"):
            def before(i, is_last):
                model.set_requires_gradient_sync(is_last)
        if "divide" in row.options:
            model.set_gradient_divide_factor(row.options["divide"])
    loop(
        row,
        model,
        folder,
        loss_of,
        data_rank=rank(),
        before=before,
        clip=clip_of(row),
        optimizer=optimizer_of(row, model),
    )


def tensor_parallel(row, folder):
    """By parallelize_module, with sequence parallelism or without, under FSDP2 where there are four ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module)

    model, data_rank = model_of(row), 0
    if world() > 1:
        join()
        mesh = init_device_mesh("cpu", (row.data, world() // row.data), mesh_dim_names=("dp", "tp"))
        data_rank, tp = mesh.get_local_rank("dp"), mesh["tp"]
        sp = row.options.get("sp")
        out = dict(output_layouts=Shard(1)) if sp else {}
        for layer in model.layers.values():
            plan = {**{name: ColwiseParallel() for name in "qkv"}, "o": RowwiseParallel(**out), "up": ColwiseParallel(),
                    "gate": ColwiseParallel(), "down": RowwiseParallel(**out)}
            if sp:
                plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
                gathered = dict(input_layouts=Shard(1))
                plan |= {name: ColwiseParallel(**gathered) for name in ("q", "k", "v", "up", "gate")}
            parallelize_module(layer, tp, plan)
        parallelize_module(model, tp, {
            "head": ColwiseParallel(input_layouts=Shard(1) if sp else Replicate(), output_layouts=Replicate()),
            **({"norm": SequenceParallel(), "layers.0": PrepareModuleInput(
                input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)} if sp else {}),
            **({"embedding": RowwiseParallel(input_layouts=Replicate())} if row.options.get("embedding") else {})})
        if row.data > 1:
            for layer in model.layers.values():
                fully_shard(layer, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
    loop(row, model, folder, loss_of, data_rank=data_rank, clip=clip_of(row), optimizer=optimizer_of(row, model))


def pipeline(row, folder):
    """Schedules of torch.distributed.pipelining, which average over micro-batches."""
    import torch
    from torch.distributed import pipelining

    model, m, stages = model_of(row), row.micro_batches, row.options.get("stages", 1)
    if world() == 1:
        return loop(row, model, folder, loss_of)
    join()
    parts, built = [], []
    kind, count = getattr(pipelining.schedules, row.options["schedule"]), world() * stages
    style = row.options.get("style", "loop")
    own = [rank() + i * world() for i in range(stages)] if style == "loop" else [rank(), count - 1 - rank()]
    for index in own:
        part, size = model_of(row), 4 // count
        if index:
            part.embedding = part.position = None
        if index < count - 1:
            part.norm = part.head = None
        for name in [*part.layers]:
            if not index * size <= int(name) < (index + 1) * size:
                del part.layers[name]
        parts.append(part)
        built.append(pipelining.PipelineStage(part, index, count, torch.device("cpu")))

    def loss(logits, ids):
        return cross_entropy(logits[:, :-1], ids[:, 1:])
    schedule = kind(built if stages > 1 else built[0], n_microbatches=m, loss_fn=loss)
    optimizer = torch.optim.AdamW([param for part in parts for param in part.parameters()], lr=1e-3, foreach=False)
    watch = Watch(parts, optimizer, folder)
    for step in range(STEPS):
        ids, losses = tokens(step), []
        inputs = (ids,) if 0 in own else ()
        more = dict(target=ids, losses=losses) if count - 1 in own else {}
        schedule.step(*inputs, **more)
        watch.step(loss=float(sum(losses) / m) if losses else None)
        optimizer.step()
        optimizer.zero_grad()
    watch.close()


def row(words, run, m=1, ranks=2, data=1, model="decoder", dtype="float64", **options):
    return Row("torch", model, words, run, micro_batches=m, ranks=ranks, data=data, dtype=dtype, options=options)


OPTIMIZERS = {
    "AdamW": dict(foreach=True),
    "SGD": dict(momentum=0.9, nesterov=True),
    "Adafactor": {},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {},
    "ASGD": {},
    "Rprop": {},
    "Muon": {},
}
ROWS = [row("DDP 2", ddp, m, data=2) for m in (1, 2)]
ROWS += [
    row("DDP 2, no_sync", ddp, 2, data=2, no_sync=True),
    row("DDP 2, clipped", ddp, 2, data=2, clip=True),
    row("DDP 2", ddp, model="tied decoder", data=2, kind="tied"),
    row("DDP 2, static_graph", ddp, data=2, ddp=dict(static_graph=True)),
    row("DDP 2, gradient_as_bucket_view", ddp, 2, data=2, ddp=dict(gradient_as_bucket_view=True, bucket_cap_mb=0.01)),
    row("DDP 2, find_unused_parameters", ddp, 2, data=2, ddp=dict(find_unused_parameters=True)),
    row("DDP 2, compiled by aot_eager", ddp, data=2, compiled=True),
    row("DDP 2, ZeroRedundancyOptimizer", ddp, data=2, zero=True),
]
ROWS += [row("FSDP2 2", fsdp2, m, data=2) for m in (1, 2)]
ROWS += [row("FSDP2 2, no_sync", fsdp2, 2, data=2, no_sync=True), row("FSDP2 2, clipped", fsdp2, 2, data=2, clip=True),
         row("FSDP2 2", fsdp2, model="tied decoder", data=2, kind="tied"),
         row("FSDP2 2, not resharded", fsdp2, 2, data=2, reshard=False),
         row("FSDP2 2, reduced in float32", fsdp2, data=2, reduce="float32"),
         row("FSDP2 4", fsdp2, data=4, ranks=4),
         row("FSDP2 2, divide factor 2", fsdp2, data=2, divide=2.0),
         row("HSDP 2 x 2", fsdp2, data=4, ranks=4, shape=(2, 2)), row("HSDP 2 x 2, clipped", fsdp2, 2, data=4, ranks=4,
                                                                     shape=(2, 2), clip=True)]
ROWS += [row(f"FSDP2 2, {name}", fsdp2, data=2, optimizer=(name, options)) for name, options in OPTIMIZERS.items()]
ROWS += [row(f"tp 2, {name}", tensor_parallel, optimizer=(name, options)) for name, options in OPTIMIZERS.items()]
ROWS += [
    row(
        words + ", clipped" * clip, tensor_parallel, 2, ranks=2 * data, data=data, sp=sp, clip=clip, embedding=embedding
    )
    for clip in (False, True)
    for words, data, sp, embedding in (
        ("tp 2, embedding too", 1, False, True),
        ("tp 2, sequence parallel", 1, True, False),
        ("FSDP2 2 x tp 2", 2, False, False),
        ("FSDP2 2 x tp 2, sequence parallel", 2, True, False),
    )
]
ROWS += [row(f"pp 2, {schedule}", pipeline, m=4, schedule=schedule, stages=stages, style=style)
         for schedule, stages, style in (
             ("ScheduleGPipe", 1, "loop"), ("Schedule1F1B", 1, "loop"), ("ScheduleInterleaved1F1B", 2, "loop"),
             ("ScheduleLoopedBFS", 2, "loop"), ("ScheduleInterleavedZeroBubble", 2, "loop"),
             ("ScheduleZBVZeroBubble", 2, "v"), ("ScheduleDualPipeV", 2, "v"))]
