"""Lightning's Fabric and Trainer, over DDP and FSDP2 (its ModelParallelStrategy)."""

from unittest import mock

from of_torch import cross_entropy, loss_of, model_of
from rows import STEPS, Row, Watch, factor, loop, micro_batches, rank, world

NEEDS, SHOWN = ("torch==2.13.0", "lightning==2.6.6", "numpy==2.4.6"), ("lightning",)


def prepare():
    import lightning  # noqa: F401
    import lightning.fabric.strategies  # noqa: F401


def sharded(model, mesh):
    from torch.distributed.fsdp import fully_shard

    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def cut(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    for layer in model.layers.values():
        parallelize_module(layer, mesh["tensor_parallel"], {
            **{name: ColwiseParallel() for name in ("q", "k", "v", "up", "gate")}, "o": RowwiseParallel(),
            "down": RowwiseParallel()})
    return sharded(model, mesh) if mesh["data_parallel"].size() > 1 else model


def strategy_of(row, kind):
    import lightning

    if world() == 1:
        return "auto"
    if row.options["over"] == "ddp":
        return "ddp"
    library = lightning.fabric.strategies if kind == "fabric" else lightning.pytorch.strategies
    tp = row.ranks // row.data
    return library.ModelParallelStrategy(
        **({"parallelize_fn": sharded if tp == 1 else cut} if kind == "fabric" else {}),
        data_parallel_size=row.data, tensor_parallel_size=tp)


def fabric(row, folder):
    import lightning

    run = lightning.Fabric(
        accelerator="cpu", devices=row.ranks if world() > 1 else 1, strategy=strategy_of(row, "fabric")
    )
    run.launch()
    model = run.setup_module(model_of(row))
    import torch

    optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))
    data_rank = rank() // (row.ranks // row.data)

    def clip(model):
        norm = run.clip_gradients(model, optimizer, max_norm=0.1)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    loop(row, model, folder, loss_of, data_rank=data_rank, optimizer=optimizer, backward=run.backward,
         clip=clip if row.options.get("clip") else None)


def loader(row):
    import torch

    class Data(torch.utils.data.IterableDataset):
        def __iter__(self):
            return (ids for step in range(STEPS) for ids in micro_batches(row, step, rank() // (row.ranks // row.data)))

    return torch.utils.data.DataLoader(Data(), batch_size=None)


def trainer(row, folder):
    import lightning
    import torch
    from same_numbers import callbacks

    options, seen = row.options, {}

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model_of(row)

        def forward(self, ids):
            return self.model(ids)

        def configure_model(self):
            if world() > 1 and options["over"] != "ddp" and not hasattr(self, "is_cut"):
                self.is_cut = True
                (sharded if row.ranks == row.data else cut)(self.model, self.device_mesh)

        def training_step(self, ids, i):
            loss = cross_entropy(self(ids)[:, :-1], ids[:, 1:])
            seen["loss"] = seen.get("loss", 0) + float(loss.detach()) / self.trainer.accumulate_grad_batches
            return loss * factor()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3, foreach=False)

        def on_train_start(self):
            recorder = mock.Mock() if options.get("callback") else None  # which records by itself
            self.watch = Watch(self.trainer.model, self.optimizers(), folder, recorder=recorder)

        def on_before_optimizer_step(self, optimizer):
            if "clip" not in options:
                self.watch.step(loss=seen.pop("loss"))

        def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            if "clip" in options:
                self.clip_gradients(optimizer, gradient_clip_val=gradient_clip_val or options["clip"])
                self.watch.step(loss=seen.pop("loss"))

        def on_train_end(self):
            self.watch.close()

    lightning.Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        devices=row.ranks if world() > 1 else 1,
        strategy=strategy_of(row, "trainer"),
        accumulate_grad_batches=row.micro_batches * (row.data if world() == 1 else 1),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[callbacks.lightning(folder)] if options.get("callback") else [],
        **({"gradient_clip_val": options["clip"]} if options.get("over") == "ddp" and "clip" in options else {}),
    ).fit(Module(), loader(row))


def rows(kind, run):
    for words, over, ranks, data in (
        ("DDP 2", "ddp", 2, 2),
        ("FSDP2 2", "mesh", 2, 2),
        ("FSDP2 2 x tp 2", "mesh", 4, 2),
        ("tp 2", "mesh", 2, 1),
    ):
        for m, more in ((1, {}), (2, {}), (2, dict(clip=0.1))):
            yield Row(
                "lightning", kind, words + ", clipped" * bool(more), run, m, ranks, data, options=dict(more, over=over)
            )


ROWS = [*rows("Fabric", fabric), *rows("Trainer", trainer),
        Row("lightning", "Trainer", "DDP 2, recorded by the callback", trainer, data=2,
            options=dict(over="ddp", clip=1.0, callback=True))]
