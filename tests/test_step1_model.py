"""Step 1's Llama against Hugging Face's, and its initial weights."""

import hashlib
import json
from unittest import mock

import pytest
import torch
from lab.huggingface import reference, their_name
from lab.launch import ROOT, modules_of
from support.recordings import LLAMA3
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

with modules_of(1):
    import model as llama
    from utils import CONFIG_FIELDS, UserError, load_config

LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}


def tiny_config(**changes):
    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=88, num_hidden_layers=3, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2)
    return LlamaConfig(**{**sizes, **changes})


def build(config, dtype=torch.float64, seed=1):
    with torch.device("meta"):
        model = llama.Llama(config, dtype)
    llama.init_weights(model, seed, torch.device("cpu"))
    return model


@pytest.mark.parametrize("tied, kv_heads, exact_norm, tolerance", [
    (False, 2, True, 1e-9), (True, 4, True, 1e-9), (True, 1, False, 1e-6)])  # the last one's norms are in float32
def test_equals_huggingface(tied, kv_heads, exact_norm, tolerance):
    config = tiny_config(num_key_value_heads=kv_heads, tie_word_embeddings=tied)
    compare(config, 48, tolerance, exact_norm)


def compare(config, seq_len: int, tolerance: float, exact_norm: bool = True) -> None:
    """Logits, loss and every gradient."""
    ours = build(config)
    theirs = reference(config, dict(ours.named_parameters()), exact_norm)
    tokens = torch.randint(96, (2, seq_len + 1), generator=torch.Generator().manual_seed(0))
    input_ids, target_ids = tokens[:, :-1], tokens[:, 1:]

    logits = ours(input_ids)
    loss = llama.cross_entropy(logits, target_ids)
    loss.backward()
    expected = theirs(input_ids, use_cache=False).logits
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), target_ids.flatten())
    expected_loss.backward()

    assert (logits - expected).abs().max() <= tolerance * logits.abs().max()
    assert abs(loss - expected_loss) <= tolerance
    gradients = {name: param.grad for name, param in theirs.named_parameters()}
    assert gradients.keys() == {their_name(name) for name, _ in ours.named_parameters()}
    for name, param in ours.named_parameters():
        assert (param.grad - gradients[their_name(name)]).abs().max() <= tolerance, name


@pytest.mark.parametrize("head_dim, rope", [
    (128, {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}),  # Llama 3.1 and 3.3
    *((size, {**LLAMA3, "original_max_position_embeddings": 8192}) for size in (64, 128)),  # Llama 3.2 1B and 3B
    (128, LLAMA3), (96, LINEAR)], ids=str)
def test_angles_have_the_bits_of_huggingface(head_dim, rope):
    """Far from the beginning, where the smallest difference of a frequency has grown to a large one of an angle."""
    config = tiny_config(head_dim=head_dim, max_position_embeddings=131072, rope_parameters=rope)
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(20000)[None])
    found = llama.get_cos_sin(20000, head_dim, torch.float32, torch.device("cpu"), **rope)
    assert all(torch.equal(ours, theirs[0]) for ours, theirs in zip(found, expected, strict=True))


def test_initial_weights_depend_on_seed_and_name_alone():
    weights = dict(build(tiny_config()).named_parameters())
    shallower = dict(build(tiny_config(num_hidden_layers=3, vocab_size=50)).named_parameters())
    for name, weight in weights.items():
        if "embedding" not in name and "final_proj" not in name:
            assert torch.equal(weight, shallower[name]), name
    again, other_seed = build(tiny_config()), dict(build(tiny_config(), seed=2).named_parameters())
    for name, param in again.named_parameters():
        assert torch.equal(param, weights[name])
        assert param.dim() == 1 or not torch.equal(param, other_seed[name]), name
    digests = {hashlib.sha256(w.detach().numpy().tobytes()).hexdigest() for w in weights.values() if w.dim() == 2}
    assert len(digests) == sum(w.dim() == 2 for w in weights.values()), "two matrices start from the same numbers"


def test_bfloat16_activations_over_float32_masters():
    model = build(tiny_config(), torch.bfloat16)
    logits = model(torch.arange(12).view(1, 12))
    llama.cross_entropy(logits, torch.arange(12).view(1, 12)).backward()
    assert logits.dtype == torch.bfloat16
    assert all(param.dtype == param.grad.dtype == torch.float32 for param in model.parameters())


def write_config(folder, style: str, rope: dict, **changes) -> None:
    """The tiny Llama's, as transformers 5 writes it, as Llama 3.1 was published, or from before the field mlp_bias."""
    fields = json.loads((ROOT / "assets" / "tiny_llama" / "config.json").read_text()) | {"rope_parameters": rope}
    if style != "complete":
        del fields["head_dim"], fields["rope_parameters"]
        fields["rope_theta"], fields["rope_scaling"] = rope["rope_theta"], {**rope}
        del fields["rope_scaling"]["rope_theta"]
    if style == "oldest":  # this one is left to Hugging Face
        del fields["mlp_bias"]
    (folder / "config.json").write_text(json.dumps({**fields, **changes}))


@pytest.mark.parametrize("style", ["complete", "older"])
@pytest.mark.parametrize("changes, expected", [
    *(({"rope_type": kind}, f"does not implement rope_type={kind!r} .needs 'default' or 'linear' or 'llama3'")
      for kind in ("dynamic", "yarn", "longrope")),
    *(({name: value}, f"rope_type='llama3' with {name}={value!r}: set a number above ")
      for name in LLAMA3 if name not in ("rope_theta", "rope_type") for value in (None, 0, "8")),
    ({"high_freq_factor": 1.0}, "high_freq_factor=1.0: set a number above low_freq_factor"),
    ({"rope_type": "linear", "factor": -4.0}, "rope_type='linear' with factor=-4.0"),
], ids=str)
def test_rotary_parameters_that_are_refused(tmp_path, style, changes, expected):
    rope = {name: value for name, value in {**LLAMA3, **changes}.items() if value is not None}  # None: it is missing
    write_config(tmp_path, style, rope)
    with pytest.raises(UserError, match=expected):
        llama.Llama(load_config(str(tmp_path), num_attention_heads=None))


@pytest.mark.parametrize("rope", [{"rope_theta": 1e4, "rope_type": "default"}, LLAMA3,
                                  {"rope_theta": 1e4, "type": "linear", "factor": 4.0}], ids=str)
@pytest.mark.parametrize("style", ["complete", "older", "oldest"])
def test_configuration_is_what_hugging_face_reads(tmp_path, style, rope):
    write_config(tmp_path, style, rope)
    ours, theirs = load_config(str(tmp_path), num_attention_heads=None), AutoConfig.from_pretrained(tmp_path)
    assert {name: getattr(ours, name) for name in CONFIG_FIELDS} == {
        name: theirs.to_dict()[name] for name in CONFIG_FIELDS}


def test_a_configuration_with_a_byte_order_mark(tmp_path):
    write_config(tmp_path, "complete", LLAMA3)
    expected, path = load_config(str(tmp_path), num_attention_heads=None), tmp_path / "config.json"
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert load_config(str(tmp_path), num_attention_heads=None) == expected


@pytest.mark.parametrize("dtype, on_gpu, kv_heads", [
    (torch.float32, True, 4), (torch.bfloat16, True, 2), (torch.float32, False, 2)])
def test_float32_heads_are_repeated_on_a_gpu(dtype, on_gpu, kv_heads):
    """There, enable_gqa has no float32 kernel but the one that keeps all T x T scores. No GPU is needed here."""
    config = tiny_config()
    attention = build(config, dtype).decoder_layers[0].attention
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    cos, sin = llama.get_cos_sin(6, 8, dtype, x.device, rope_theta=1e4)
    expected, attend, seen = attention(x, cos, sin), torch.nn.functional.scaled_dot_product_attention, []

    def watch(q, k, v, is_causal, enable_gqa):
        seen.append((k.size(1), v.size(1), enable_gqa))
        return attend(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa)

    with mock.patch.object(torch.Tensor, "is_cuda", on_gpu), \
            mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", watch):
        found = attention(x, cos, sin)
    assert seen == [(kv_heads, kv_heads, kv_heads < 4)]
    assert (found - expected).abs().max() <= 1e-6
