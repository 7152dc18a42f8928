"""LitGPT's models as its pretraining sets them up, by Lightning's Fabric over DDP and FSDP."""

from of_torch import cross_entropy
from rows import VOCABULARY, Row, loop, rank, shake, world

NEEDS, SHOWN = ("torch==2.13.0", "litgpt==0.5.13"), ("litgpt", "lightning")
SIZES = dict(block_size=16, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, n_layer=2, n_head=4, n_embd=32)
LLAMA = dict(SIZES, n_query_groups=2, rotary_percentage=1.0, parallel_residual=False, bias=False,
             norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", intermediate_size=64)
MODELS = {"pythia": SIZES, "llama": LLAMA, "qwen3": dict(LLAMA, norm_qk=True),
          "gemma": dict(LLAMA, scale_embeddings=True, mlp_class_name="GemmaMLP", attention_logit_softcapping=50.0),
          "mixtral": dict(LLAMA, mlp_class_name="LLaMAMoE", n_expert=4, n_expert_per_token=2)}


def prepare():
    import lightning.fabric.strategies  # noqa: F401
    import litgpt.model  # noqa: F401


def train(row, folder):
    import lightning
    import torch
    from lightning.fabric.strategies import FSDPStrategy
    from litgpt.model import GPT, Block, Config

    strategy = "auto" if world() == 1 else row.options["over"]
    if strategy == "fsdp":
        strategy = FSDPStrategy(auto_wrap_policy={Block}, sharding_strategy="HYBRID_SHARD")
    run = lightning.Fabric(accelerator="cpu", devices=2 if world() > 1 else 1, strategy=strategy)
    run.launch()
    model = run.setup_module(shake(GPT(Config(**MODELS[row.model]))))
    optimizer = run.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False))

    def clip(model):
        return run.clip_gradients(model, optimizer, max_norm=0.1)
    loop(row, model, folder, lambda model, ids: cross_entropy(model(ids)[:, :-1], ids[:, 1:]), data_rank=rank(),
         optimizer=optimizer, backward=run.backward, clip=clip if row.options.get("clip") else None)


ROWS = [Row("litgpt", model, words, train, m, data=2, options=dict(over="ddp", clip=clip))
        for model in MODELS for words, m, clip in (("DDP 2", 1, False), ("DDP 2, clipped", 2, True))]
ROWS += [Row("litgpt", "llama", "FSDP 2", train, data=2, options=dict(over="fsdp"))]
