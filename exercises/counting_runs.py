"""What the checks of exercises that count measure: models of any shape, their FLOPs, and the bytes that they hold."""

import functools
import types

import torch
from torch.utils.flop_counter import FlopCounterMode

from lab.program import Program
from lab.watch.held import Live

SHAPE = ("vocab", "hidden", "width", "layers", "heads", "kv_heads", "head_dim")
SHAPES = [dict(zip(SHAPE, sizes)) for sizes in (
    (32, 16, 24, 1, 2, 2, 8), (32, 16, 24, 3, 2, 1, 8), (100, 24, 40, 2, 4, 2, 6), (64, 32, 96, 2, 4, 4, 4),
    (64, 32, 96, 5, 8, 2, 6), (1024, 128, 352, 8, 8, 4, 16))]
SEVEN_B = dict(zip(SHAPE, (32000, 4096, 11008, 32, 32, 32, 128)))


@functools.cache
def modules(step: str):
    return Program(step).load()


def llama(vocab, hidden, width, layers, heads, kv_heads, head_dim, tied=False, device="meta"):
    """Step 8's model of this shape; on the CPU with random weights."""
    fields = dict(vocab_size=vocab, hidden_size=hidden, intermediate_size=width, num_hidden_layers=layers,
                  num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, rms_norm_eps=1e-5,
                  rope_parameters={"rope_theta": 10000.0, "rope_type": "default"}, tie_word_embeddings=tied,
                  initializer_range=0.02, model_type="llama", hidden_act="silu", attention_bias=False, mlp_bias=False)
    with torch.device(device):
        return modules("8").model.Llama(types.SimpleNamespace(**fields))


@functools.cache
def flops_of_a_sample(seq_len: int, vocab, hidden, width, layers, *heads: int) -> int:
    """Those of forward and backward, as torch counts them. On the meta device nothing is computed.

    All layers are alike, so of more than two, each adds what the second one does.
    """
    if layers > 2:
        one, two = (flops_of_a_sample(seq_len, vocab, hidden, width, few, *heads) for few in (1, 2))
        return one + (layers - 1) * (two - one)
    model = llama(vocab, hidden, width, layers, *heads)
    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        model(torch.zeros(1, seq_len, dtype=torch.long)).sum().backward()
    return counter.get_total_flops()


@functools.cache
def parameters_of(**shape: int) -> int:
    return sum(param.numel() for param in llama(**shape).parameters())


def count_of(shape: dict) -> int:
    return parameters_of(**shape)


def weights_that_multiply(shape: dict) -> int:
    return sum(param.numel() for name, param in llama(**shape).named_parameters()
               if param.dim() > 1 and "embedding" not in name)


LAYER = [dict(zip(("tokens", "hidden", "width", "heads", "head_dim"), sizes)) for sizes in (
    (4, 16, 24, 2, 8), (8, 16, 24, 2, 8), (32, 16, 24, 2, 8), (8, 32, 24, 2, 8), (8, 16, 96, 2, 8), (8, 16, 24, 4, 8),
    (8, 16, 24, 2, 16), (16, 32, 96, 4, 4), (64, 128, 352, 8, 16), (16, 48, 128, 4, 12), (24, 24, 40, 3, 4),
    (128, 64, 172, 4, 16))]


@functools.cache
def kept_bytes(layers: int, recompute: bool, tokens, hidden, width, heads, head_dim) -> int:
    """What `layers` layers keep of their forward; with `recompute` until the last one is computed again."""
    model = llama(32, hidden, width, layers, heads, heads, head_dim, device="cpu")
    cos, sin = modules("8").model.get_cos_sin(tokens, head_dim, torch.float32, torch.device("cpu"), rope_theta=1e4)
    x, held, seen = torch.randn(1, tokens, hidden, requires_grad=True), Live(), []
    grad = torch.ones_like(x)
    for layer in model.decoder_layers:
        def noted(*args, forward=layer.forward):
            try:
                return forward(*args)
            finally:  # computing again stops by an exception, once backward has what it needs
                seen.append(held.now)

        layer.forward = noted
    if recompute:
        modules("8").utils.recompute_layers(model.decoder_layers)
    with held:
        for layer in model.decoder_layers:
            x = layer(x, cos, sin)
        kept = held.now
        x.backward(grad)
    return seen[layers] if recompute else kept


@functools.cache
def sample_of(samples: int, **shape: int) -> int:
    """Bytes that a model of this shape keeps of so many samples of 8 tokens."""
    model, held = llama(**shape, device="cpu"), Live()
    modules("8").model.get_cos_sin(8, shape["head_dim"], torch.float32, torch.device("cpu"), rope_theta=1e4,
                                   rope_type="default")
    ids = torch.zeros(samples, 8, dtype=torch.long)
    with held:
        out = model(ids)
        return held.now + 0 * out.numel()
