"""accelerate: the loop of its users, over DDP and FSDP2, with accumulation and its data loaders."""

from of_torch import loss_of, model_of
from rows import SAMPLES, STEPS, Row, Watch, tokens, world

NEEDS, SHOWN = ("torch==2.13.0", "accelerate==1.15.0", "numpy==2.4.6"), ("accelerate",)
PATCH = "the distributed type set to FSDP, which accelerate keeps from a CPU"


def prepare():
    import accelerate  # noqa: F401


def run(row, folder):
    """Its data loader deals samples to ranks; micro-batches of 2."""
    import accelerate
    import torch

    options, size = row.options, row.options.get("size", 2)
    plugin = None
    if options.get("fsdp") and world() > 1:
        import accelerate.state

        plugin = accelerate.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
            cpu_ram_efficient_loading=False,
            reshard_after_forward=options.get("reshard", True),
        )
    accumulation = SAMPLES // size // (row.data if world() > 1 else 1)
    more = dict(split_batches=True) if options.get("split_batches") else {}
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=accumulation, fsdp_plugin=plugin, dataloader_config=(
            accelerate.DataLoaderConfiguration(**more)))
    if plugin is not None:
        from accelerate.utils import DistributedType

        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state._shared_state["distributed_type"] = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    samples = torch.cat([tokens(step) for step in range(STEPS)])
    batch = size * (world() if more else 1)
    loader = torch.utils.data.DataLoader(samples, batch_size=batch, shuffle=bool(options.get("shuffle")),
                                         generator=torch.Generator().manual_seed(7))
    model = model_of(row)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    prepared = [model, optimizer, loader] + [schedule] * bool(options.get("schedule"))
    model, optimizer, loader, *schedules = accelerator.prepare(*prepared)
    watch, total = Watch(model, optimizer, folder), 0.0
    for ids in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, ids)
            accelerator.backward(loss)
            total += float(loss.detach()) / accumulation
            norm = None
            if accelerator.sync_gradients:
                if options.get("clip"):
                    norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
                    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                watch.step(loss=total, norm=norm)
                total = 0.0
            optimizer.step()
            [each.step() for each in schedules]
            optimizer.zero_grad()
    watch.close()


ROWS = [
    Row("accelerate", "decoder", over + words, run, data=2, patch=PATCH if fsdp else "", options=dict(more, fsdp=fsdp))
    for over, fsdp in (("DDP 2", False), ("FSDP2 2", True))
    for words, more in (
        ("", {}),
        (", clipped", dict(clip=True)),
        (", shuffled", dict(shuffle=True)),
        (", no accumulation", dict(size=4)),
        (", split_batches", dict(split_batches=True)),
        (", scheduler", dict(schedule=True)),
    )
]
