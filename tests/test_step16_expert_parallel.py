"""Step 16's experts against Hugging Face's Mixtral, and what is particular to them."""

import gc
import weakref

import pytest
import torch
from lab.huggingface import ExactRMSNorm, their_name
from lab.program import Program
from transformers import LlamaConfig, MixtralConfig, MixtralForCausalLM

STEP = Program(16).load()
SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2)


def build(num_experts: int = 8, experts_per_token: int = 2) -> torch.nn.Module:
    config = LlamaConfig(**SIZES, num_experts=num_experts, experts_per_token=experts_per_token)
    with torch.device("meta"):
        model = STEP.model.Llama(config, torch.float64)
    STEP.model.init_weights(model, 1, torch.device("cpu"), lambda full, dim: full)
    return model


class ExactRouter(torch.nn.Module):
    """Mixtral's router without its cast to float32."""

    def __init__(self, router):
        super().__init__()
        self.weight, self.k = router.weight, router.top_k

    def forward(self, x):
        logits = torch.nn.functional.linear(x.flatten(0, -2), self.weight)
        weights, chosen = logits.softmax(-1).topk(self.k)
        return logits, weights / weights.sum(-1, keepdim=True) if self.k > 1 else weights, chosen


def mixtral(ours: torch.nn.Module, k: int, fused) -> MixtralForCausalLM:
    """Hugging Face's, in float64 throughout, with our weights. `fused`: tensors of ours by our names -> by theirs."""
    config = MixtralConfig(**SIZES, num_local_experts=ours.config.num_experts, num_experts_per_tok=k,
                           rope_parameters=ours.config.rope_parameters)
    config._attn_implementation, config._experts_implementation = "sdpa", "eager"
    model = MixtralForCausalLM(config).double()
    model.load_state_dict(fused)
    for name, module in list(model.named_modules()):
        if exact := {"MixtralRMSNorm": ExactRMSNorm, "MixtralTopKRouter": ExactRouter}.get(type(module).__name__):
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, exact(module))
    return model


def fuse(ours: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """Mixtral keeps a layer's experts as (E, 2 I, D), gate over up, and (E, D, I)."""
    fused = {their_name(name).replace("mlp.router", "mlp.gate"): tensor for name, tensor in ours.items()
             if ".experts." not in name}
    for layer in range(SIZES["num_hidden_layers"]):
        gate, up, down = (torch.stack([ours[f"decoder_layers.{layer}.mlp.experts.{e}.{part}_proj.weight"]
                                       for e in range(num_experts)]) for part in ("gate", "up", "down"))
        fused[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up], dim=1)
        fused[f"model.layers.{layer}.mlp.experts.down_proj"] = down
    return fused


@pytest.mark.parametrize("num_experts, k", [(8, 2), (4, 1), (4, 4)])
def test_equals_mixtral(num_experts, k):
    """Logits, loss and every gradient. Its balance loss couples the layers: it is left out."""
    ours = build(num_experts, k)
    tokens = torch.randint(96, (2, 49), generator=torch.Generator().manual_seed(0))
    input_ids, target_ids = tokens[:, :-1], tokens[:, 1:]
    logits = ours(input_ids, torch.arange(48))
    STEP.model.cross_entropy(logits, target_ids).backward()
    theirs = mixtral(ours, k, fuse({n: p.detach() for n, p in ours.named_parameters()}, num_experts))
    expected = theirs(input_ids, use_cache=False).logits
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), target_ids.flatten()).backward()
    assert (logits - expected).abs().max() <= 1e-9 * logits.abs().max()
    gradients = fuse({name: param.grad for name, param in ours.named_parameters()}, num_experts)
    found = {name: param.grad for name, param in theirs.named_parameters()}
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert (gradient - found[name]).abs().max() <= 1e-9, name


def test_balance_loss_is_added_to_the_gradient(world_of_one, parsed):
    """Switch's loss of each layer, with a weight, is in the gradient of the loss that is logged."""
    STEP.process_group_manager.setup_process_group_manager(1, 1, 1)
    tokens = torch.randint(96, (2, 17), generator=torch.Generator().manual_seed(0))
    found, plain = build(), build()
    args = parsed(STEP.train, "--num_experts 8 --balance_loss 0.3 --gradient_accumulation_steps 2")
    STEP.expert_parallel.ExpertBalance(args, found, torch.device("cpu"))
    outputs = []
    for layer in plain.decoder_layers:
        layer.mlp.router.register_forward_hook(lambda module, args, output: outputs.append(output))
    losses = [STEP.model.cross_entropy(model(tokens[:, :-1], torch.arange(16)), tokens[:, 1:]) for model in (found, plain)]
    assert losses[0] == losses[1]
    losses[0].backward()
    for scores, chosen in outputs:
        fractions = torch.stack([(chosen == expert).double().mean() for expert in range(8)])
        losses[1] = losses[1] + 0.3 / 2 * 8 * (fractions * scores.mean(dim=(0, 1))).sum()
    losses[1].backward()
    for (name, param), other in zip(found.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad - other.grad).abs().max() <= 1e-14, name
    assert (found.decoder_layers[0].mlp.router.weight.grad).abs().max() > 1e-4


def test_activations_do_not_outlive_backward(world_of_one, parsed):
    """A hook that holds the tensor which holds the hook would keep the graph until Python's garbage collection."""
    STEP.process_group_manager.setup_process_group_manager(1, 1, 1)
    model, scores = build(), []
    args = parsed(STEP.train, "--num_experts 8 --balance_loss 0.3 --gradient_accumulation_steps 2")
    STEP.expert_parallel.ExpertBalance(args, model, torch.device("cpu"))
    for layer in model.decoder_layers:
        layer.mlp.router.register_forward_hook(lambda module, args, output: scores.append(weakref.ref(output[0])))
    gc.disable()
    try:
        model(torch.arange(8).view(1, 8), torch.arange(8)).sum().backward()
        assert [ref() for ref in scores] == [None] * 3
    finally:
        gc.enable()


def test_bias_moves_against_the_load_and_not_into_the_weights(world_of_one, parsed):
    STEP.process_group_manager.setup_process_group_manager(1, 1, 1)
    model = build(num_experts=4, experts_per_token=1)
    args = parsed(STEP.train, "--num_experts 4 --balance_bias 0.25 --gradient_accumulation_steps 1")
    balance = STEP.expert_parallel.ExpertBalance(args, model, torch.device("cpu"))
    router = model.decoder_layers[0].mlp.router
    for load in balance.loads.values():
        load.copy_(torch.tensor([2, 6, 0, 0]))
    assert balance.finish_step() == 3.0, "6 rows, where the mean is 2"
    assert router.bias_of_choice.tolist() == [0, -0.25, 0.25, 0.25] and not balance.loads[router].any()
    x = torch.zeros(3, 32, dtype=torch.float64)  # all scores are 0.25
    scores, chosen = router(x)
    assert set(chosen.flatten().tolist()) <= {2, 3} and (scores == 0.25).all()
