"""OLMo-core's models, cut by their own apply_fsdp, apply_ddp and apply_tp."""

import zlib

from of_torch import cross_entropy
from rows import VOCABULARY, Row, join, loop, world

NEEDS, SHOWN = ("torch==2.13.0", "ai2-olmo-core==3.0.0"), ("ai2-olmo-core",)
MODELS = {"llama": {}, "OLMo 2": dict(block_name="reordered_norm", qk_norm=True), "head q/k norms": dict(
    qk_norm=True, use_head_qk_norm=True), "grouped queries": dict(n_kv_heads=2)}


def prepare():
    import olmo_core.nn.transformer  # noqa: F401


def train(row, folder):
    import torch
    from olmo_core.config import DType
    from olmo_core.nn.transformer import TransformerConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    options = dict(MODELS[row.model])
    if "block_name" in options:
        from olmo_core.nn.transformer import TransformerBlockType

        options["block_name"] = TransformerBlockType(options["block_name"])
    model = TransformerConfig.llama_like(
        d_model=32, vocab_size=VOCABULARY, n_layers=2, n_heads=4, hidden_size_multiple_of=64, dtype=DType.float32,
        **options).build(init_device="cpu")
    model, data_rank = model.to(getattr(torch, row.dtype)), 0
    if world() > 1:
        join()
        mesh = init_device_mesh("cpu", (row.data, world() // row.data), mesh_dim_names=("dp", "tp"))
        data_rank = mesh.get_local_rank("dp")
        if mesh["tp"].size() > 1:
            model.apply_tp(mesh["tp"])
        if row.options.get("over") == "ddp":
            model.apply_ddp(mesh["dp"])
        elif row.data > 1:
            model.apply_fsdp(mesh["dp"])
    with torch.no_grad():
        for name, param in model.named_parameters():
            whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * 0.1
            whole = whole + 1 if "norm" in name else whole
            if hasattr(param, "placements"):
                whole = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(whole)

    def loss_of(model, ids):
        logits = model(ids)
        return cross_entropy((logits.full_tensor() if hasattr(logits, "full_tensor") else logits)[:, :-1], ids[:, 1:])
    loop(row, model, folder, loss_of, data_rank=data_rank)


ROWS = [Row("olmo_core", model, words, train, 1, ranks, data, dtype="float32", options=dict(over=over))
        for words, ranks, data, over in (("FSDP2 2", 2, 2, "fsdp"), ("DDP 2", 2, 2, "ddp"), ("tp 2", 2, 1, "tp"),
                                         ("FSDP2 2 x tp 2", 4, 2, "fsdp")) for model in MODELS]
