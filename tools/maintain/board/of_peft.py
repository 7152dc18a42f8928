"""peft's LoRA and its relatives, on transformers' models, over DDP, FSDP2 and Trainer."""

import of_trainer
from of_transformers import loaded, loss_of, prepare  # noqa: F401
from rows import Row, join, loop, rank, world

NEEDS = ("torch==2.13.0", "peft==0.21.2", "transformers==5.24.0", "accelerate==1.15.0", "numpy==2.4.6")
SHOWN = ("peft", "transformers")


def adapted(row, folder, **parallel):
    import peft
    import torch

    model = loaded(row, folder, **parallel)
    torch.manual_seed(3)
    return peft.get_peft_model(model, row.options["adapter"](peft))


def shaken(model):
    """Adapters begin with zeros: random ones, the same in each rank."""
    import zlib

    import torch
    from torch.distributed.tensor import distribute_tensor

    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.requires_grad:
                draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(param.shape, dtype=torch.float64, generator=draw)
                if hasattr(param, "placements"):
                    noise = distribute_tensor(noise, param.device_mesh, param.placements, src_data_rank=None)
                param.add_(noise, alpha=0.05)
    return model


def by_hand(row, folder):
    import torch
    from torch.distributed.fsdp import fully_shard

    model = shaken(adapted(row, folder, **row.options.get("parallel", {})))
    if world() > 1:
        join()
        if row.options["over"] == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        elif row.options["over"] == "fsdp2":
            for layer in model.get_base_model().model.layers:
                fully_shard(layer)
            fully_shard(model)
    trained = [param for param in model.parameters() if param.requires_grad]
    loop(row, model, folder, loss_of, data_rank=rank() if row.data > 1 else 0,
         optimizer=torch.optim.AdamW(trained, lr=1e-3, foreach=False))


def trainer(row, folder):
    of_trainer.trainer(row, folder, model=shaken(adapted(row, folder)))


def lora(peft, **more):
    return peft.LoraConfig(target_modules=["q_proj", "v_proj", "down_proj"], r=4, lora_dropout=0.0, **more)


ADAPTERS = {
    "LoRA": lora,
    "DoRA": lambda peft: lora(peft, use_dora=True),
    "rsLoRA": lambda peft: lora(peft, use_rslora=True),
    "LoRA with bias": lambda peft: lora(peft, bias="lora_only"),
    "LoRA, embedding saved": lambda peft: lora(peft, modules_to_save=["lm_head"]),
    "IA3": lambda peft: peft.IA3Config(
        target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
}
ROWS = [Row("peft", f"llama {name}", words, run, 1, 2, data, options=dict(adapter=adapter, **more))
        for name, adapter in ADAPTERS.items() for words, run, data, more in (
            ("DDP 2", by_hand, 2, dict(over="ddp")), ("FSDP2 2", by_hand, 2, dict(over="fsdp2")),
            ("tp_plan 2", by_hand, 1, dict(over="tp", parallel=dict(tp_plan="auto"))))]
ROWS += [
    Row(
        "peft", "llama LoRA", f"Trainer, DDP 2{words}", trainer, data=2, options=dict(adapter=lora, arguments=arguments)
    )
    for words, arguments in (
        ("", {}),
        (", clipped", dict(max_grad_norm=0.1)),
        (", label smoothing", dict(label_smoothing_factor=0.1)),
    )
]
