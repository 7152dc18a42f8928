"""Llama: token embedding, decoder layers (attention and MLP, with norms and residuals), final norm, projection.

Shapes: B samples, T tokens a sample, D hidden, H query heads, K key/value heads, hd head size, I MLP width,
V vocabulary.

Precision: parameters, gradients and optimizer state are float32 "masters" (float64 in a float64 run). Activations are
cast to the run's dtype once, after the embedding, and each matmul uses a copy of its weight in the dtype of its input,
made once an optimizer step. A bfloat16 run therefore needs no autocast.

Initial weights: each parameter is drawn from its own random generator, seeded by the run's seed and the parameter's
name. Its values do not depend on which parameters were drawn before it, nor on the machine that draws them.
"""

import contextlib
import functools
import hashlib

import torch
import torch.nn as nn
import torch.nn.functional as F

from utils import UserError


@functools.lru_cache(maxsize=4)
def get_cos_sin(
    seq_len: int, head_dim: int, dtype: torch.dtype, device: torch.device,
    rope_theta: float, rope_type: str = "default", **scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines, each (T, hd), of the angle position / rope_theta^(2i/hd) (RoFormer, Su et al. 2021).

    The last arguments are a configuration's rope_parameters: by keyword, the cache can hash them. For longer texts,
    `linear` divides all frequencies 1 / rope_theta^(2i/hd) by a factor, and `llama3` only the low ones (Llama 3.1).
    Angles are computed in float32 whatever the dtype, and in the order of operations of Hugging Face.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim  # (hd/2,)
    frequencies = 1.0 / rope_theta**exponents
    if rope_type == "linear":
        frequencies = frequencies / scaling["factor"]
    elif rope_type == "llama3":
        # How often a pair turns in a text as long as those of the training before the stretch
        turns = scaling["original_max_position_embeddings"] / (2 * torch.pi / frequencies)  # (hd/2,)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # (hd/2,): 1 for high frequencies, 0 for low ones
        frequencies = (1 - kept) * frequencies / scaling["factor"] + kept * frequencies
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequencies)  # (T, hd/2)
    angles = torch.cat([angles, angles], dim=-1)  # (T, hd)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (x[i], x[i + hd/2]) of x (B, heads, T, hd) by the position's angle."""
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-x2, x1], dim=-1) * sin


casts: dict[tuple[nn.Parameter, torch.dtype], torch.Tensor] | None = None  # copies, inside of cast_weights_once


@contextlib.contextmanager
def cast_weights_once():
    """Inside of this block each weight is cast at its first use, and all micro-batches share the copy.

    Autograd keeps the copy until backward. Without the block, each micro-batch that waits for its backward would keep a
    copy of its own. The block has to end before the optimizer changes the weights.
    """
    global casts
    casts = {}
    try:
        yield
    finally:
        casts = None


def cast(weight: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """The weight in the dtype of the activations. Backward casts the gradient to the dtype of the weight."""
    if weight.dtype == dtype or torch.compiler.is_compiling() or casts is None:  # compiled code keeps no copy anyway
        return weight.to(dtype)
    if (weight, dtype) not in casts:
        casts[weight, dtype] = weight.to(dtype)
    return casts[weight, dtype]


def linear(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """x W^T in the dtype of x: (..., in), (out, in) -> (..., out). The gradient of a float32 weight is float32."""
    return F.linear(x, cast(weight, x.dtype))


class Linear(nn.Linear):
    """nn.Linear that multiplies in the dtype of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        return linear(x, self.weight)


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # there are no numbers on the meta device, and torch would take seconds over them
            super().reset_parameters()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, cast(self.weight, x.dtype), self.eps)


class Attention(nn.Module):
    """Causal self-attention; H/K query heads share a key/value head (grouped-query attention, Ainslie et al. 2023)."""

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * self.head_dim, bias=False)
        self.k_proj = Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.v_proj = Linear(config.hidden_size, config.num_key_value_heads * self.head_dim, bias=False)
        self.out_proj = Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        batch, seq_len, _ = x.shape
        # The number of heads is computed from the width, so that a layer can also hold only some of the heads.
        q = self.q_proj(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)  # (B, H, T, hd)
        k = self.k_proj(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)  # (B, K, T, hd)
        v = self.v_proj(x).view(batch, seq_len, -1, self.head_dim).transpose(1, 2)  # (B, K, T, hd)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        is_grouped = q.size(1) != k.size(1)
        if is_grouped and q.is_cuda and q.dtype == torch.float32:  # only the kernel that stores all T x T scores shares
            k, v = (heads.repeat_interleave(q.size(1) // k.size(1), dim=1) for heads in (k, v))  # float32 heads
            is_grouped = False
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)  # (B, H, T, hd)
        return self.out_proj(out.transpose(1, 2).reshape(batch, seq_len, -1))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, I) -> (B, T, D)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:  # (B, T, D) -> (B, T, D)
        x = x + self.attention(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """The whole model. `config` has the fields of a Hugging Face `LlamaConfig`, `dtype` is that of the activations.

    Raises UserError for a configuration that asks for something this model does not implement.
    """

    def __init__(self, config, dtype: torch.dtype = torch.float32):
        super().__init__()
        check_config(config)
        self.config, self.dtype = config, dtype
        self.embedding = Embedding(config.vocab_size, config.hidden_size)
        self.decoder_layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.final_proj = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Gives the final projection the weight of the embedding, where the configuration says that they share one."""
        if self.config.tie_word_embeddings:
            self.final_proj.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # (B, T) -> logits (B, T, V)
        x = self.embedding(input_ids).to(self.dtype)  # (B, T, D)
        cos, sin = get_cos_sin(x.size(1), self.config.head_dim, x.dtype, x.device, **self.config.rope_parameters)
        for layer in self.decoder_layers:
            x = layer(x, cos, sin)
        return self.final_proj(self.final_norm(x))


def cross_entropy(logits: torch.Tensor, target_ids: torch.Tensor) -> torch.Tensor:
    """Mean of -log p(target) over the tokens, computed in float32 or better: (B, T, V), (B, T) -> scalar."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), target_ids.flatten())


def check_config(config) -> None:
    """Raises UserError for a configuration that this model does not implement."""
    numbers = ["rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    rope_types = {"default": numbers[:1], "linear": numbers[:2], "llama3": numbers}  # and the numbers that each needs
    expected = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
                "attention_dropout": 0}
    found = {name: getattr(config, name, 0 if name == "attention_dropout" else None) for name in expected}
    unlike = [f"{name}={found[name]!r} (needs {want!r})" for name, want in expected.items() if found[name] != want]
    rope = getattr(config, "rope_parameters", None) or {}
    if (rope_type := rope.get("rope_type", "default")) not in list(rope_types):
        unlike.append(f"rope_type={rope_type!r} (needs {' or '.join(map(repr, rope_types))})")
    if unlike:
        raise UserError(f"this Llama does not implement {', '.join(unlike)}: choose another --model_name")
    for name in rope_types[rope_type]:
        above = "low_freq_factor" if name == "high_freq_factor" else 0
        if type(value := rope.get(name)) not in (int, float) or not value > rope.get(above, 0):
            raise UserError(f"rope_type={rope_type!r} with {name}={value!r}: set a number above {above} in config.json")
    for whole, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
        if (size := getattr(config, whole)) % (count := getattr(config, part)):
            raise UserError(f"{whole}={size} is not a multiple of {part}={count}: choose a --{part} that divides it")


@torch.no_grad()
def init_weights(model: nn.Module, seed: int, device: torch.device, split) -> None:
    """Gives a model on the meta device its initial weights, on `device`. They depend on `seed` and the names only.

    Norm weights are one. Matrices are normal with standard deviation `config.initializer_range`, divided by
    sqrt(2 * layers) for those that write into the residual stream, so that the sum over all layers does not grow with
    their number (GPT-2, Radford et al. 2019). All are drawn in float32 on the CPU, the same for any device and dtype.
    Where a module is split over ranks, each rank draws the full tensor and keeps the part `split(full, dim)`.
    """
    config = model.config
    with torch.device("meta"):
        full_shapes = {name: param.shape for name, param in Llama(config).named_parameters()}
    for name, param in list(model.named_parameters()):  # a tied weight is listed once, by its first name
        full = torch.ones(full_shapes[name])
        if param.dim() == 2:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
            writes_residual = name.endswith(("out_proj.weight", "down_proj.weight"))
            depth_scale = (2 * config.num_hidden_layers) ** -0.5 if writes_residual else 1.0
            full.normal_(0.0, config.initializer_range * depth_scale, generator=generator)
        module, _, key = name.rpartition(".")
        part = split(full, getattr(model.get_submodule(module), "tp_dims", {}).get(key)).clone()
        master_dtype = torch.float64 if model.dtype == torch.float64 else torch.float32
        setattr(model.get_submodule(module), key, nn.Parameter(part.to(device, master_dtype)))
    model.tie_weights()
