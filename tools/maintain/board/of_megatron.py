"""megatron-core's GPT over tensor, expert and pipeline parallelism, with its own data parallelism and finalizer."""

from rows import STEPS, VOCABULARY, Row, Watch, factor, micro_batches, rank, world

NEEDS, SHOWN = ("torch==2.13.0", "megatron-core==0.16.1", "numpy==2.4.6"), ("megatron-core",)
PATCH = "what asks for a GPU: torch.cuda.current_device, zeros on it, its random state"


def prepare():
    import contextlib

    import torch
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel  # noqa: F401

    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *args, **kwargs: contextlib.nullcontext()
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda *args: None
    zeros = torch.zeros

    def zeros_here(*args, **kwargs):
        return zeros(*args, **{key: value for key, value in kwargs.items() if (key, value) != ("device", "cuda")})
    torch.zeros = zeros_here


def config_of(row):
    import torch
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    sizes = row.options.get("sizes", {}) if world() > 1 else {}
    more = dict(row.options.get("config", {}))
    more.update(sequence_parallel=bool(more.get("sequence_parallel")) and world() > 1)
    kind = MLATransformerConfig if more.pop("latent", False) else TransformerConfig
    return kind(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        ffn_hidden_size=64,
        use_cpu_initialization=True,
        tensor_model_parallel_size=sizes.get("tp", 1),
        pipeline_model_parallel_size=sizes.get("pp", 1),
        expert_model_parallel_size=sizes.get("ep", 1),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.float64,
        pipeline_dtype=torch.float64,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        add_bias_linear="num_moe_experts" not in more,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=False,
        **more,
    )


def full_of(param, grad):
    """The whole of a gradient, by the parameter's attributes."""
    import torch
    from megatron.core import parallel_state

    if grad is None or not getattr(param, "tensor_model_parallel", False) or world() == 1:
        return None if grad is None else grad.clone()
    group = parallel_state.get_tensor_model_parallel_group()
    parts = [torch.empty_like(grad) for _ in range(group.size())]
    torch.distributed.all_gather(parts, grad.contiguous(), group=group)
    if getattr(param, "partition_stride", 1) > 1:  # each rank has a part of the gates, then a part of the rest
        parts = [part.chunk(2, param.partition_dim)[half] for half in (0, 1) for part in parts]
    return torch.cat(parts, param.partition_dim)


def forward_step(batches, model):
    """As Megatron's schedules call it: (output, a function to the loss)."""
    import torch

    ids = next(batches)
    mask, positions = torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1), torch.arange(12).expand(len(ids), 12)
    out = model(ids, positions, mask, labels=ids.roll(-1, 1))
    return out, lambda losses: ((loss := losses[:, :-1].mean()) * factor(), {"loss": float(loss.detach())})


def gpt(row, folder):
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func

    sizes = row.options.get("sizes", {}) if world() > 1 else {}
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes.get("tp", 1), pipeline_model_parallel_size=sizes.get("pp", 1),
        expert_model_parallel_size=sizes.get("ep", 1))
    config, more = config_of(row), row.options.get("config", {})
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(
        num_experts=more.get("num_moe_experts"), moe_grouped_gemm=False, qk_layernorm=more.get("qk_layernorm", False),
        multi_latent_attention=bool(more.get("latent")))
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=12,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=bool(row.options.get("tied")),
        position_embedding_type="rope" if more.get("latent") else "learned_absolute",
    ).double()
    seed_by_name(model, config)
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=False), model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)

    def gradient(param):
        return param.main_grad if hasattr(param, "main_grad") else param.grad
    watch = Watch(model, optimizer, folder, full=lambda param, grad: full_of(param, gradient(param)),
                  whole_name=lambda name: whole_name(name, model, config))
    run, data = get_forward_backward_func(), parallel_state.get_data_parallel_rank()
    config.finalize_model_grads_func = finalize_model_grads
    for step in range(STEPS):
        parts = micro_batches(row, step, data)
        wrapped.zero_grad_buffer()
        found = run(
            forward_step_func=forward_step,
            data_iterator=iter(parts),
            model=[wrapped],
            num_microbatches=len(parts),
            seq_length=12,
            micro_batch_size=len(parts[0]),
            forward_only=False,
        )
        for param in model.parameters():
            param.grad = gradient(param)
        watch.step(loss=sum(each["loss"] for each in found) / len(found) if found else None)
        optimizer.step()
        optimizer.zero_grad()  # param.grad was its main_grad
    watch.close()


def whole_name(name, model, config):
    """The name in the whole model: layers and experts of a rank count from 0."""
    from megatron.core import parallel_state

    words = name.split(".")
    if "layers" in words:
        i = words.index("layers")
        words[i + 1] = str(model.decoder.layers[int(words[i + 1])].layer_number - 1)
    if "local_experts" in words:
        i = words.index("local_experts")
        words[i + 1] = str(int(words[i + 1]) + parallel_state.get_expert_model_parallel_rank() * (
            config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()))
    return ".".join(words)


def seed_by_name(model, config):
    """Weights that do not depend on how the model is cut: of the whole parameter, drawn by its name, a rank's part."""
    import zlib

    import torch
    from megatron.core import parallel_state

    for name, param in model.named_parameters():
        group, name, shape = parallel_state, whole_name(name, model, config), list(param.shape)
        cut = getattr(param, "tensor_model_parallel", False)
        expert = "local_experts" in name
        size = group.get_expert_tensor_parallel_world_size() if expert else group.get_tensor_model_parallel_world_size()
        place = group.get_expert_tensor_parallel_rank() if expert else group.get_tensor_model_parallel_rank()
        if cut:
            shape[param.partition_dim] *= size
        whole = torch.randn(
            shape, dtype=torch.float64, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))
        )
        whole = whole * 0.05 + (1.0 if "norm" in name and name.endswith("weight") else 0.0)
        with torch.no_grad():
            if cut and getattr(param, "partition_stride", 1) > 1:
                whole = torch.cat([half.chunk(size, param.partition_dim)[place] for half in whole.chunk(
                    2, param.partition_dim)], param.partition_dim)
            elif cut:
                whole = whole.chunk(size, param.partition_dim)[place]
            param.copy_(whole)


MODELS = {
    "GPT": {},
    "GPT qk_layernorm": dict(qk_layernorm=True),
    "GPT grouped queries": dict(num_query_groups=2),
    "GPT gated": dict(gated_linear_unit=True),
    "GPT experts": dict(
        num_moe_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
    ),
    "GPT latent attention": dict(
        latent=True,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
        rope_type="rope",
        normalization="LayerNorm",
    ),
}


def rows():
    for model, config in MODELS.items():
        for words, sizes, ranks, data, m in (
            ("tp 2", dict(tp=2), 2, 1, 1),
            ("tp 2", dict(tp=2), 2, 1, 2),
            ("dp 2", {}, 2, 2, 2),
            ("pp 2", dict(pp=2), 2, 1, 4),
            ("dp 2 x tp 2", dict(tp=2), 4, 2, 2),
        ):
            yield Row("megatron", model, words, gpt, m, ranks, data, patch=PATCH,
                      options=dict(config=config, sizes=sizes, group=True))
    experts = MODELS["GPT experts"]
    for words, sizes, ranks, data in (("ep 2", dict(ep=2), 2, 2), ("ep 2 x tp 2", dict(ep=2, tp=2), 4, 2)):
        yield Row("megatron", "GPT experts", words, gpt, 1, ranks, data, patch=PATCH,
                  options=dict(config=experts, sizes=sizes, group=True))
    yield Row("megatron", "GPT tied", "pp 2", gpt, 4, 2, 1, patch=PATCH,
              options=dict(config={}, sizes=dict(pp=2), tied=True, group=True))
    yield Row("megatron", "GPT", "tp 2, sequence parallel", gpt, 1, 2, 1, patch=PATCH, options=dict(
        config=dict(sequence_parallel=True), sizes=dict(tp=2), group=True))


ROWS = [*rows()]
