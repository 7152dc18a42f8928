"""transformers' own parallelism: `tp_plan="auto"` of each causal family that builds at toy size; DistributedConfig."""

from rows import Row, join, loop, rank, shake, world

NEEDS, SHOWN = ("torch==2.13.0", "transformers==5.24.0", "accelerate==1.15.0", "numpy==2.4.6"), ("transformers",)
FAMILIES = """afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid bamba beam codegen cohere cohere2
    cohere2_moe cohere_compass_text cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dory dots1
    dots3_note_text ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon_h1 flex_olmo flint gemma gemma2 gemma3_text
    gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss gptj
    granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2
    jamba kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4_text longcat_flash mellum mimo_v2_flash
    minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral nanochat nemotron nemotron_h
    olmo olmo2 olmo3 olmo_hybrid olmoe phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe
    qwen3_next qwen4_exp_text sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu""".split()
SIZES = dict(  # by the names that configurations use; each takes those that it has
    vocab_size=64, vocab_size_per_layer_input=64, hidden_size=32, n_embd=32, hidden_size_per_layer_input=8,
    intermediate_size=64, n_inner=64, ffn_dim=64, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    num_hidden_layers=2, n_layer=2, num_attention_heads=4, n_head=4, num_key_value_heads=2, head_dim=8, rotary_dim=8,
    q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, n_routed_experts=4,
    num_local_experts=4, num_experts=4, moe_num_experts=4, num_experts_per_tok=2, num_experts_per_token=2,
    moe_topk=2, moe_k=2, top_k_experts=2, first_k_dense_replace=1, n_group=1, topk_group=1, n_shared_experts=1,
    max_position_embeddings=64, n_positions=64, sliding_window=6, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    num_nextn_predict_layers=0, query_pre_attn_scalar=8, tie_word_embeddings=False, use_cache=False)
LATENT = dict.fromkeys(
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 "
    "sarvam_mla youtu dots3_note_text bailing_hybrid kimi_linear".split(),
    dict(num_key_value_heads=4),
)
MAMBA = dict(mamba_n_heads=8, mamba_d_head=8, mamba_expand=2, mamba_n_groups=1, mamba_d_state=8)
LINEAR = dict(linear_head_dim=8, linear_num_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
              linear_num_key_heads=2, linear_num_value_heads=4)
SIZES |= LINEAR | dict(
    qk_head_dim=16, ssm_state_size=8, mamba_num_heads=8, mamba_head_dim=8, n_groups=1, swa_num_attention_heads=4,
    swa_num_key_value_heads=2, swa_head_dim=8, unpadded_vocab_size=64, index_n_heads=4, index_head_dim=8, index_topk=4,
    o_groups=2, o_lora_rank=16, moe_shared_expert_intermediate_size=32, num_kv_shared_layers=0, num_expert_group=1,
    rel_extent=64, mamba_d_ssm=64, indexer_compress_ratio=2, indexer_budget=4)
BY_FAMILY = {  # what a family needs beside them
    **LATENT, "bamba": MAMBA, "granitemoehybrid": MAMBA | dict(shared_intermediate_size=32),
    "falcon_h1": MAMBA, "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1),
    "longcat_flash": LATENT["longcat_flash"] | dict(ffn_hidden_size=64, expert_ffn_hidden_size=32, num_layers=1),
    "gemma3n_text": dict(activation_sparsity_pattern=[0.0, 0.0], intermediate_size=[64, 64], laurel_rank=8),
    "cohere_compass_text": dict(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 1e4}}),
    "dory": dict(n_input_layers=2, n_recurrent_layers=2, n_output_layers=2, num_hidden_layers=6,
                 layer_types=["sliding_attention", "mlp"] * 3),
    "dots3_note_text": LATENT["dots3_note_text"] | dict(
        swa_q_lora_rank=16, swa_kv_lora_rank=16, swa_num_attention_heads=4, swa_num_key_value_heads=4,
        swa_qk_nope_head_dim=8, swa_qk_rope_head_dim=8, swa_v_head_dim=8),
    "glm4_moe use_qk_norm": dict(use_qk_norm=True), "phi qk_layernorm": dict(qk_layernorm=True),
    "cohere use_qk_norm": dict(use_qk_norm=True),
}


def config_of(model: str, **more):
    """`model` is a family, or a family and a setting that BY_FAMILY has."""
    import transformers

    family = model.split()[0]
    known = transformers.CONFIG_MAPPING[family]().to_dict()
    layers, sizes = 2, {**SIZES}
    for key in ("layer_types", "mlp_layer_types"):  # at least one of each kind
        if kinds := [*dict.fromkeys(known.get(key) or ())]:
            layers = max(layers, len(kinds))
            sizes[key] = kinds
    for key in {"layer_types", "mlp_layer_types"} & sizes.keys():
        sizes[key] = (sizes[key] * layers)[:layers]
    sizes |= {"num_hidden_layers": layers, "n_layer": layers, **BY_FAMILY.get(model, {}), **more}
    config = transformers.AutoConfig.for_model(family, **{
        key: value for key, value in sizes.items() if key in known or key in BY_FAMILY.get(model, {}) or key in more})
    for key in vars(config):
        if "drop" in key and isinstance(getattr(config, key), float):
            setattr(config, key, 0.0)
    config._experts_implementation = "eager"  # others do not compute in float64
    return config


def prepare():
    import accelerate  # noqa: F401  here, once
    import transformers
    from transformers.distributed import checkpoint, tensor_parallel  # noqa: F401
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    transformers.AutoModelForCausalLM.from_config(config_of("llama"))


def before(row):
    """Imports the model's module, once for all ranks."""
    import transformers

    transformers.AutoModelForCausalLM._model_mapping[transformers.CONFIG_MAPPING[row.model.split()[0]]]


def toy(row, **more):
    import transformers

    return shake(transformers.AutoModelForCausalLM.from_config(config_of(row.model, **more)))


def loaded(row, folder, **parallel):
    """The toy model, saved by rank 0 and read back, by each rank its part."""
    import torch
    import transformers

    kept = folder / "model"
    if world() > 1:
        join()
    if rank() == 0:
        toy(row, **row.options.get("config", {})).save_pretrained(kept)
    if world() > 1:
        torch.distributed.barrier()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        kept, dtype=getattr(torch, row.dtype), experts_implementation="eager", **(parallel if world() > 1 else {}))
    return model.train()


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def tp_plan(row, folder):
    loop(row, loaded(row, folder, tp_plan="auto"), folder, loss_of)


def distributed(row, folder):
    """By DistributedConfig. Ranks of a tp group share samples; loss and gradients are means over the others."""
    from transformers.distributed import DistributedConfig

    sizes = row.options["sizes"]
    model = loaded(row, folder, distributed_config=DistributedConfig(**sizes))
    loop(row, model, folder, loss_of, data_rank=rank() // sizes.get("tp_size", 1))


def clipped(row, folder):
    import torch

    loop(row, loaded(row, folder, tp_plan="auto"), folder, loss_of,
         clip=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False))


def of_sizes(model, words, m=1, **sizes):
    data = sizes.get("fsdp_size", 1) * sizes.get("dp_replicate_size", 1)
    ranks = data * sizes.get("tp_size", 1) * sizes.get("pp_size", 1)
    return Row(
        "transformers", model, words, distributed, micro_batches=m, ranks=ranks, data=data, options=dict(sizes=sizes)
    )


DENSE, SPARSE = (
    "llama qwen3 gemma3_text glm4 phi3 cohere2".split(),
    "mixtral qwen3_moe deepseek_v3 gpt_oss glm4_moe".split(),
)
ROWS = [
    of_sizes(model, words, m, **sizes)
    for words, sizes in (
        ("ep 4 of fsdp 2 x tp 2", dict(fsdp_size=2, tp_size=2, ep_size=4)),
        ("ep 2 of tp 2", dict(tp_size=2, ep_size=2)),
        ("ep 2 of fsdp 2", dict(fsdp_size=2, ep_size=2)),
        ("ep 2 of fsdp 2 x tp 2", dict(fsdp_size=2, tp_size=2, ep_size=2)),
    )
    for m in (1, 2)
    for model in SPARSE
]
ROWS += [of_sizes("llama", "pp 2", pp_size=2), of_sizes("qwen3", "fsdp 2 x pp 2", fsdp_size=2, pp_size=2)]
ROWS += [Row("transformers", model, "tp_plan 2, clipped", clipped) for model in DENSE[:3] + SPARSE[:2]]
ROWS += [
    of_sizes(model, "hsdp 2 x 2", fsdp_size=2, dp_replicate_size=2) for model in ("llama", "gemma3_text", "mixtral")
]
ROWS += [of_sizes(model, "fsdp 2 x tp 2", m, fsdp_size=2, tp_size=2) for m in (1, 2) for model in DENSE + SPARSE[:3]]
ROWS += [of_sizes(model, "fsdp 2", m, fsdp_size=2) for m in (1, 2) for model in DENSE + SPARSE]
ROWS += [Row("transformers", model, "tp_plan 2", tp_plan, micro_batches=m)
         for model in FAMILIES + [name for name in BY_FAMILY if " " in name] for m in (1, 2)]
