"""DeepSpeed's ZeRO 0 to 3 over gloo, in float32: its buffers are float32 whatever the model is."""

from of_torch import loss_of, model_of
from rows import SAMPLES, Row, loop, rank, world

NEEDS, SHOWN = ("torch==2.13.0", "deepspeed==0.19.8", "numpy==2.4.6"), ("deepspeed",)


def prepare():
    import deepspeed

    deepspeed.ops.__compatible_ops__.update(
        dict.fromkeys(deepspeed.ops.__compatible_ops__, False)
    )  # else it compiles some


def zero(row, folder):
    import deepspeed
    import torch
    from deepspeed.utils import safe_get_full_grad

    options, model = row.options, model_of(row).float()
    deepspeed.init_distributed("gloo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    size = SAMPLES // row.data // row.micro_batches
    config = {"train_micro_batch_size_per_gpu": size, "zero_allow_untested_optimizer": True,
              "gradient_accumulation_steps": row.micro_batches * (row.data if world() == 1 else 1),
              "zero_force_ds_cpu_optimizer": False, "gradient_clipping": options.get("clip", 0.0),
              "zero_optimization": {"stage": options["stage"] if world() > 1 else 0, **options.get("zero", {})}}
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    parts = row.micro_batches * (row.data if world() == 1 else 1)

    def full(param, grad):
        found = safe_get_full_grad(param)
        return grad.clone() if found is None and grad is not None else found if found is None else found.clone()

    def backward(loss):
        engine.backward(loss * parts)  # it divides by the number of micro-batches itself
    count = [0]

    def of_engine(model, ids):
        if count[0] % parts:
            engine.step()  # of micro-batches before the last one it changes nothing, but counts
        count[0] += 1
        return loss_of(model, ids)
    loop(row, engine, folder, of_engine, data_rank=rank(), optimizer=optimizer, backward=backward, update=engine.step,
         full=full)


ROWS = [Row("deepspeed", "decoder", f"ZeRO {stage}{words}", zero, m, data=2, dtype="float32",
            options=dict(more, stage=stage, group=True))
        for stage in (0, 1, 2, 3) for words, m, more in (
            ("", 1, {}), ("", 2, {}), (", clipped", 1, dict(clip=0.1)),
            (", communication overlapped", 1, dict(zero=dict(overlap_comm=True, contiguous_gradients=True))))]
