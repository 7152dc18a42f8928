"""Step 9: pipeline templates, and which models they are made for. The stages' math: test_step9_stage_weights.py."""

import copy
import inspect
import re

import pytest
import torch
from lab.huggingface import run_chain
from lab.launch import ROOT
from support.families import (
    FAMILIES, TOYS, TRIED, PipelineTemplate, our_model, stages_of, toy, toy_batch, toy_on_meta,
)
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig

GPT2 = "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"
GPT2_MODULES = ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0", "transformer.h.1",
                "transformer.h.2", "transformer.ln_f", "lm_head"]


def our_llama() -> torch.nn.Module:
    with torch.device("meta"):
        return our_model.Llama(LlamaConfig(vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=3,
                                           num_attention_heads=4, num_key_value_heads=2), torch.float64)


def test_the_names_of_a_model():
    model = toy_on_meta("gpt2")
    assert PipelineTemplate.get_model_name(model) == GPT2
    assert PipelineTemplate.get_modules(model) == GPT2_MODULES
    assert PipelineTemplate.get_modules(toy_on_meta("opt-projected")) == [
        "model.decoder.embed_tokens", "model.decoder.embed_positions", "model.decoder.project_in",
        *(f"model.decoder.layers.{i}" for i in range(3)), "model.decoder.project_out", "lm_head"]
    assert PipelineTemplate.get_model_name(our_llama()) == "model.Llama"
    assert PipelineTemplate.get_modules(our_llama()) == [
        "embedding", *(f"decoder_layers.{i}" for i in range(3)), "final_norm", "final_proj"]


def test_templates_from_layers_per_stage():
    model = toy_on_meta("gpt2")
    template = PipelineTemplate.from_layers_per_stage(model, [1, 2])
    assert template == PipelineTemplate(GPT2, [GPT2_MODULES[:4], GPT2_MODULES[4:]])
    assert PipelineTemplate.from_layers_per_stage(model, [3]).modules_per_stage == (tuple(GPT2_MODULES),)
    template.check(model)
    for sizes in [], [2, 2], [3, 0], [4, -1]:
        with pytest.raises(ValueError, match="the model has 3: give each stage at least one, 3 in all"):
            PipelineTemplate.from_layers_per_stage(model, sizes)


WTE, WPE, DROP, H0, H1, H2, NORM, HEAD = GPT2_MODULES
MISMATCH = "Modules in the pipeline template do not match the modules in the model: "


@pytest.mark.parametrize("stages, message", [
    ([[WTE, WPE, DROP, H0], [H2, NORM, HEAD]], f"{MISMATCH}missing: {H1}"),
    ([[WTE, WPE, DROP, H0], [H1, "h.2", NORM]], f"{MISMATCH}missing: {H2}, {HEAD}; unknown: h.2"),
    ([[WTE, WPE, DROP, H0, H1], [H1, H2, NORM, HEAD]], f"{MISMATCH}repeated: {H1}"),
    ([[WTE, WPE, DROP, H0, H2], [H1, NORM, HEAD]], f"{MISMATCH}misplaced: {H2} (where the model has {H1})"),
    ([[H0, H1], [WTE, WPE, DROP, H2, NORM, HEAD]],
     f"The first stage must contain the {WTE} module: move it to stage 0 of 0 to 1"),
    ([[WTE, WPE, DROP, H0], [H1, H2, NORM], [HEAD]],
     f"The last stage must contain the {NORM} module: move it to stage 2 of 0 to 2"),
])
def test_a_template_that_is_not_the_models(stages, message):
    model = toy_on_meta("gpt2")
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PipelineTemplate(GPT2, stages).check(model)


def test_a_model_of_no_family():
    model = CLIPTextModel(CLIPTextConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1))
    name = "transformers.models.clip.modeling_clip.CLIPTextModel"
    message = f"^Auto policy for {re.escape(name)} is not implemented"
    for attempt in PipelineTemplate.get_modules, PipelineTemplate(name, [["a"]]).check:
        with pytest.raises(NotImplementedError, match=message) as error:
            attempt(model)
        assert all(family in str(error.value) for family in FAMILIES)


NEWER = r" \(transformers: this version, 9.9, is newer than those tried \(5.17 to 5.\d+\)\)$"


@pytest.mark.parametrize("name, version, message", [
    ("cache", "9.9", None), ("past_key_values", "5.17.0", None), ("kv_store", "5.17.0", r"but hidden states$"),
    ("kv_store", "9.9", "its layers also need kv_store, and stages send each other nothing but hidden states" + NEWER),
])
def test_what_layers_of_another_version_take(name, version, message, monkeypatch):
    """Both names of the cache are known. Of a third name, the error says so where the version was not tried."""
    parameters = [inspect.Parameter(each, inspect.Parameter.POSITIONAL_OR_KEYWORD)
                  for each in ("self", "hidden_states", "attention_mask", name)]
    model = toy_on_meta("llama")
    monkeypatch.setattr(type(model.model.layers[0]).forward, "__signature__", inspect.Signature(parameters), raising=False)
    monkeypatch.setattr("transformers.__version__", version)
    if not message:
        assert len(PipelineTemplate.get_modules(model)) == 6
        return
    with pytest.raises(NotImplementedError, match=message):
        PipelineTemplate.get_modules(model)


def test_versions_that_were_tried():
    """From the lower bound of setup.py to what constraints.txt has."""
    bounds = dict(re.findall(r'"(\w+)>=([\d.]+)"', (ROOT / "setup.py").read_text()))
    pinned = dict(re.findall(r"^(\w+)==(\d+\.\d+)\.\S*?(?:;.*>=.*)?$", (ROOT / "constraints.txt").read_text(), re.M))
    assert {package: (bounds[package], pinned[package]) for package in TRIED} == TRIED


def test_layerdrop_is_refused():
    with pytest.raises(NotImplementedError, match="layerdrop=0.1 skips layers at random.* set layerdrop=0"):
        PipelineTemplate.get_modules(toy_on_meta("opt", layerdrop=0.1))


def test_every_family_is_tested():
    assert FAMILIES.keys() - {type(toy_on_meta(name).base_model).__name__ for name in TOYS} == {"Llama"}


def test_dropout_is_that_of_the_stages_own_modules():
    """With dropout in embeddings and head alone, and one seed, a chain in train() draws what the whole model does."""
    changes = {"gpt2": dict(embd_pdrop=0.5), "bert-classifier": dict(classifier_dropout=0.5)}
    for name, change in changes.items():
        whole, batch = toy(name, **change), toy_batch(name)
        for train in True, False:
            stages = [stage.train(train) for stage in stages_of(lambda: copy.deepcopy(whole), [1, 2])]
            torch.manual_seed(5)
            expected = whole.train(train)(**batch).logits
            torch.manual_seed(5)
            assert torch.equal(run_chain(stages, batch)[0].logits, expected)
            if train:
                torch.manual_seed(6)
                assert not torch.equal(run_chain(stages, batch)[0].logits, expected)
