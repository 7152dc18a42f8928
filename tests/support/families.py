"""Hugging Face's models at toy size in float64, each family that step 9 can cut, with a batch and a loss.

Sizes are chosen so that what is often alike differs: Qwen3's head size is not hidden size / heads, Mistral's and
Qwen2's windows are shorter than the samples, one OPT has projections around its layers and no final norm. Mixtral has
more experts than a step's tokens reach, and its router's loss. Phi, Cohere, GLM-4-MoE and Apertus have norms or
activations with parameters inside of what tensor parallelism splits, which their own plans leave out.
"""

import pathlib
import sys

import torch
import torch.nn.functional as F
import transformers
from transformers.utils import logging

sys.path.append(str(pathlib.Path(__file__).parents[2]))  # in a rank pytest.ini does not count
from lab.launch import modules_of  # noqa: E402

with modules_of(9):  # here, once: tests take them from this module
    import hf_tensor_parallel
    import model as our_model
    import process_group_manager as pgm
    import tensor_parallel
    from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
    from pipeline_stage import PipelineStage
    from pipeline_template import FAMILIES, TRIED, PipelineTemplate, listed_modules
    from stage_weights import load_weights

logging.set_verbosity_error()
logging.disable_progress_bar()

SIZES = dict(vocab_size=96, hidden_size=32, num_hidden_layers=3, num_attention_heads=4)
LLAMA = dict(SIZES, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=32, pad_token_id=0)
MANY_HEADS = dict(LLAMA, num_attention_heads=8, num_key_value_heads=4)  # so that four tp ranks divide them
GPT2 = dict(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, bos_token_id=1, eos_token_id=2, pad_token_id=0)
OPT = dict(SIZES, ffn_dim=48, max_position_embeddings=32, dropout=0.0)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
BERT = dict(SIZES, intermediate_size=48, max_position_embeddings=32, **NO_DROPOUT)
TOYS = {  # name -> class of the model, its configuration
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", LLAMA),
    "granite": ("GraniteForCausalLM", dict(LLAMA, embedding_multiplier=3.0, residual_multiplier=0.5)),
    "mistral": ("MistralForCausalLM", dict(LLAMA, sliding_window=4)),
    "qwen2": ("Qwen2ForCausalLM", dict(LLAMA, use_sliding_window=True, sliding_window=4, max_window_layers=1)),
    "qwen3": ("Qwen3ForCausalLM", dict(LLAMA, head_dim=16)),
    "mixtral": ("MixtralForCausalLM", dict(LLAMA, num_local_experts=32, num_experts_per_tok=1,
                                           output_router_logits=True, router_aux_loss_coef=0.1)),
    "opt": ("OPTForCausalLM", OPT),
    "opt-projected": ("OPTForCausalLM", dict(OPT, word_embed_proj_dim=16, do_layer_norm_before=False)),
    "gpt-neox": ("GPTNeoXForCausalLM", dict(SIZES, intermediate_size=48, max_position_embeddings=32, pad_token_id=0)),
    "phi": ("PhiForCausalLM", dict(MANY_HEADS, qk_layernorm=True, resid_pdrop=0.0)),
    "cohere": ("CohereForCausalLM", dict(MANY_HEADS, use_qk_norm=True)),
    "glm4-moe": ("Glm4MoeForCausalLM", dict(MANY_HEADS, use_qk_norm=True, head_dim=4, n_routed_experts=4,
                                            num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1)),
    "apertus": ("ApertusForCausalLM", MANY_HEADS),
    "gpt2-classifier": ("GPT2ForSequenceClassification", dict(GPT2, num_labels=3)),
    "llama-classifier": ("LlamaForSequenceClassification", dict(LLAMA, num_labels=3)),
    "llama-tagger": ("LlamaForTokenClassification", dict(LLAMA, num_labels=96, classifier_dropout=0.0)),
    "qwen3-answers": ("Qwen3ForQuestionAnswering", dict(LLAMA, head_dim=16)),
    "bert": ("BertForMaskedLM", BERT),
    "bert-classifier": ("BertForSequenceClassification", dict(BERT, num_labels=3)),
    "vit": ("ViTForImageClassification", dict(hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_labels=3,
                                              intermediate_size=48, image_size=16, patch_size=4, **NO_DROPOUT)),
}
DECODERS = ("gpt2", "llama", "granite", "mistral", "mixtral", "qwen2", "qwen3", "opt", "gpt-neox")
TIED = ("gpt2", "llama", "granite", "mistral", "qwen2", "qwen3", "opt", "opt-projected", "gpt-neox", "bert")  # can be
CASES = [(name, tied) for name in TOYS for tied in ((False, True) if name in TIED else (False,))]
IDS = [f"{name}{'-tied' * tied}" for name, tied in CASES]


def toy_config(name: str, tied: bool = False, **changes):
    model_class, sizes = getattr(transformers, TOYS[name][0]), TOYS[name][1]
    config = model_class.config_class(**{**sizes, "tie_word_embeddings": tied, **changes})
    config._experts_implementation = "eager"  # others cannot compute in float64
    return config


def toy(name: str, tied: bool = False, **changes) -> torch.nn.Module:
    """The model in float64; every parameter is random, biases and norms too, the same in each process."""
    torch.manual_seed(1)
    model = getattr(transformers, TOYS[name][0])(toy_config(name, tied, **changes)).double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.1)
    return model


def toy_on_meta(name: str, tied: bool = False, **changes) -> torch.nn.Module:
    with torch.device("meta"):
        return getattr(transformers, TOYS[name][0])(toy_config(name, tied, **changes)).to(torch.float64)


def toy_batch(name: str) -> dict[str, torch.Tensor]:
    """Three samples, the second and third padded; for GPT-2 and BERT with token types."""
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator, dtype=torch.float64)}
    input_ids = torch.randint(3, 96, (3, 10), generator=generator)
    attention_mask = (torch.arange(10) < torch.tensor([[10], [7], [4]])).long()
    batch = {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}
    if name.startswith("bert"):
        batch["token_type_ids"] = torch.randint(2, (3, 10), generator=generator)
    if name == "gpt2":
        batch["token_type_ids"] = torch.randint(96, (3, 10), generator=generator)
    return batch


def toy_loss(out, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross entropy of a model's output against targets that the batch decides; padding does not count. Of a class a
    sample these are the batch's `targets`, or those of toy_batch."""
    logits = logits_of(out)
    if logits.dim() == 2:
        return F.cross_entropy(logits, batch.get("targets", torch.tensor([0, 2, 1])))
    targets = (batch["input_ids"] * 7 + 1).remainder(96).masked_fill(batch["attention_mask"] == 0, -100)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * (getattr(out, "aux_loss", None) or 0)


def logits_of(out) -> torch.Tensor:
    """The logits; of a model that answers questions, those of the answer's two ends, (B, T), together."""
    return out.start_logits + 2 * out.end_logits if "start_logits" in out else out.logits


def stages_of(make, sizes: list[int]) -> list[PipelineStage]:
    """The stages of a pipeline, each made of a model of its own that make() gives."""
    template = PipelineTemplate.from_layers_per_stage(make(), sizes)
    return [PipelineStage(make(), template, i) for i in range(len(sizes))]


def stages_on_meta(name: str, sizes: list[int], tied: bool = False, **changes) -> list[PipelineStage]:
    return stages_of(lambda: toy_on_meta(name, tied, **changes), sizes)
