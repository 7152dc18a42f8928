"""A Hugging Face `LlamaForCausalLM` with the weights of our Llama, as the reference that owes nothing to our code; and
stages of step 9 one after the other, in one process."""

import contextlib
import re
from unittest import mock

import torch
from transformers import LlamaForCausalLM

NAMES = (  # our parameter -> Hugging Face's
    (r"^embedding\.", "model.embed_tokens."),
    (r"^decoder_layers\.", "model.layers."),
    (r"^final_norm\.", "model.norm."),
    (r"^final_proj\.", "lm_head."),
    (r"\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attention\.", ".self_attn."),
)


class ExactRMSNorm(torch.nn.Module):
    """Hugging Face's norm without its cast to float32."""

    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


@contextlib.contextmanager
def float64_throughout():
    """Many models compute norms, softmax or routers in float32, whatever their dtype. Here they do it in float64."""
    with mock.patch.multiple(torch, float32=torch.float64, float=torch.float64):
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield


def their_name(name: str) -> str:
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def reference(config, weights: dict[str, torch.Tensor], exact_norm: bool = True) -> LlamaForCausalLM:
    """In float64, with our parameters by their names; `exact_norm` keeps the norms in float64 too."""
    config._attn_implementation = "sdpa"  # the eager one computes its softmax in float32
    model = LlamaForCausalLM(config).double()
    missing, unexpected = model.load_state_dict({their_name(n): w for n, w in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    if exact_norm:
        for name, module in list(model.named_modules()):
            if type(module).__name__ == "LlamaRMSNorm":
                parent, _, key = name.rpartition(".")
                setattr(model.get_submodule(parent), key, ExactRMSNorm(module))
    return model


def run_chain(stages: list, batch: dict):
    """The last one's output of step 9's stages, and what flows from each to the next: what one sent, what the other
    received."""
    received, wires = None, []
    for stage in stages[:-1]:
        sent = stage(received, **batch)
        received = sent.detach().requires_grad_()  # as if it had travelled
        wires.append((sent, received))
        assert sent.shape == stage.hidden_shape(**batch)
        assert stage.received is None and stage.output is None, "the stage keeps activations alive"
    return stages[-1](received, **batch), wires


def run_backward(loss: torch.Tensor, wires: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The gradients go back the same way."""
    loss.backward()
    for sent, received in reversed(wires):
        sent.backward(received.grad)
