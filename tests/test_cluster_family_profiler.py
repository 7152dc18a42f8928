"""plan.py --measure for models of transformers, with and without LoRA: parameters and memory of each module."""

import argparse

import pytest
import torch
import torch.nn as nn
from lab.launch import modules_of

with modules_of(9):
    from models.lora import Lora
    from models.loss import mean_cross_entropy
    from pipeline_stage import PipelineStage
    from pipeline_template import PipelineTemplate
    from planning.machines import Cluster, Pipeline, Setting
    from planning.measure import measure_with
    from planning.module_memory import peak_bytes, saved_bytes
    from planning.profiler import LayerProfiler
    from planning.simulate import peak_memory

CPU, SEQ_LEN, LAYERS = torch.device("cpu"), 32, 4
SIZES = dict(vocab_size=512, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
             intermediate_size=96, max_position_embeddings=64)
FAMILIES = {
    "llama": ("LlamaForCausalLM", dict(SIZES, tie_word_embeddings=True)),
    "gpt2": ("GPT2LMHeadModel", dict(vocab_size=512, n_embd=64, n_layer=LAYERS, n_head=4, n_positions=64)),
    "qwen3": ("Qwen3ForCausalLM", dict(SIZES, head_dim=16, tie_word_embeddings=False)),
    "gemma3": ("Gemma3ForCausalLM", dict(SIZES, head_dim=16, sliding_window=8,
                                         layer_types=["sliding_attention", "full_attention"] * 2)),
    "mixtral": ("MixtralForCausalLM", dict(SIZES, num_local_experts=4, num_experts_per_tok=2)),
}


def make(family: str) -> nn.Module:
    import transformers

    name, sizes = FAMILIES[family]
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        return model_class(model_class.config_class(**sizes))


def adapters(model: nn.Module, dtype: torch.dtype, base_bits: int | None = None) -> Lora:
    return Lora(argparse.Namespace(model_name="toy", lora_rank=4, lora_alpha=8.0, lora_dropout=0.0, seed=1,
                                   lora_targets="all-linear", base_bits=base_bits), model, dtype)


def profiler_of(family: str, lora: bool, dtype: torch.dtype) -> LayerProfiler:
    model = make(family)
    return LayerProfiler(model, SEQ_LEN, dtype, CPU, adapters(model, dtype) if lora else None, mean_cross_entropy)


def measured(profiler: LayerProfiler, sizes=(1, 2)) -> Cluster:
    return Cluster({**measure_with(profiler, "toy", sizes, seconds=0.1), "flags": {}})


QUICK = [("llama", True), ("gpt2", False), ("mixtral", False)]  # tied and not, dense and with experts, full and LoRA


@pytest.mark.parametrize("family, lora", [
    *QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in (("gemma3", True), ("qwen3", False)))])
def test_memory_is_that_of_a_whole_stage(world_of_one, family, lora):
    """Added up from modules that were measured one at a time, against one stage with all layers."""
    torch.manual_seed(1)
    profiler = profiler_of(family, lora, torch.float32)
    cluster, whole = measured(profiler), make(family)
    layers = map(profiler.whole.get_submodule, profiler.layers)
    sizes = [sum(param.numel() for param in layer.parameters()) for layer in layers]
    trained = [profiler.lora.num_trained // LAYERS] * LAYERS if lora else sizes  # all layers are alike
    assert cluster.parameters[1:-1] == trained
    total = sum(param.numel() for param in whole.parameters())
    assert cluster.frozen_before[-1] + cluster.tied_frozen == pytest.approx(total if lora else 0, rel=0.05)
    template = PipelineTemplate.from_layers_per_stage(whole, [LAYERS])
    stage = PipelineStage(whole, template, 0)
    profiler.materialise(stage, has_layers=True)
    ids = torch.zeros(2, SEQ_LEN, dtype=torch.int64)

    def forward(ids):
        return mean_cross_entropy(stage(None, input_ids=ids), {"target_ids": ids})

    forward(ids).backward()
    kept = saved_bytes(lambda: forward(ids).backward(), stage.model.parameters())
    expected = cluster.activation_bytes((0, len(cluster.names)), 2, 0, "B")
    assert kept == pytest.approx(2 * cluster.saved_before["B"][-1], rel=0.06)
    assert peak_bytes(lambda: forward(ids).backward(), CPU) == pytest.approx(kept + expected, rel=0.15)


def test_frozen_weights_take_two_bytes(world_of_one):
    """In bfloat16; 18 a trained number: float32 weight, gradient, two moments, and a copy. The head's are tied."""
    profiler = profiler_of("llama", True, torch.bfloat16)
    cluster = measured(profiler)
    frozen = sum(param.numel() for param in profiler.whole.parameters())
    expected = 2 * frozen + 18 * profiler.lora.num_trained
    assert cluster.weight_bytes((0, len(cluster.names))) == expected
    first, last = cluster.stages((1, 3))
    assert cluster.weight_bytes(first) + cluster.weight_bytes(last) == expected + 2 * 512 * 64
    assert cluster.hidden_bytes == SEQ_LEN * 64 * 2
    assert peak_memory(cluster, Pipeline((0,), (LAYERS,), 4), 1, Setting())[0] > expected


def test_layers_of_two_kinds(world_of_one):
    profiler = profiler_of("gemma3", False, torch.float32)
    assert list(profiler.parts) == ["first", "layer 0", "layer 1", "last"]
    assert profiler.modules_of(dict(zip(profiler.parts, "fabl"))) == [*"fababl"], "each layer has the costs of its kind"
