"""Step 9: stages built on the meta device with weights from files compute what the model does; what tp refuses."""

import json
import shutil

import pytest
import torch
from lab.huggingface import run_backward, run_chain
from safetensors.torch import save_file
from support.families import (
    CASES, IDS, PipelineStage, PipelineTemplate, hf_tensor_parallel, load_weights, stages_on_meta, toy,
    toy_batch, toy_loss, toy_on_meta,
)
from transformers import conversion_mapping, core_model_loading
from transformers.core_model_loading import Chunk, WeightConverter


def same_parameters(stage: PipelineStage, whole) -> None:
    expected = dict(whole.named_parameters(remove_duplicate=False))
    for name, param in stage.model.named_parameters(remove_duplicate=False):
        assert torch.equal(param, expected[name]) and param.dtype == torch.float64 and param.is_contiguous(), name
    buffers = dict(whole.named_buffers())
    for name, buffer in stage.model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(name, tied) -> a directory that save_pretrained wrote, in several files."""
    folders = {}

    def save(name: str, tied: bool = False) -> str:
        if (name, tied) not in folders:
            folders[name, tied] = str(tmp_path_factory.mktemp("saved") / name)
            toy(name, tied).save_pretrained(folders[name, tied], max_shard_size="40KB")
        return folders[name, tied]

    return save


def assert_same_gradients(stages: list[PipelineStage], whole) -> None:
    """Every parameter of the whole model is held by one stage, a tied one by the first and the last."""
    expected = {name: param.grad for name, param in whole.named_parameters()}
    held: dict[str, torch.Tensor] = {}
    for stage in stages:
        params = dict(stage.model.named_parameters())
        assert not held.keys() & params.keys()
        held.update({name: param.grad for name, param in params.items()})
    if stages[0].tied and len(stages) > 1:
        embedding, head = stages[0].tied
        held[embedding] = held[embedding] + held.pop(head)
    assert held.keys() == expected.keys()
    for name, gradient in expected.items():
        assert (gradient is None) == (held[name] is None), name
        assert gradient is None or (held[name] - gradient).abs().max() <= 1e-12, name


@pytest.mark.parametrize("name, tied", CASES, ids=IDS)
def test_a_chain_of_stages_computes_the_whole_model(name, tied, saved):
    """Each was built on meta and read from a directory."""
    whole, batch = toy(name, tied), toy_batch(name)
    stages = stages_on_meta(name, [1, 1, 1], tied)
    for stage in stages:
        load_weights(stage, saved(name, tied))
        same_parameters(stage, whole)
    assert (stages[0].tied is not None) == tied
    expected = toy_loss(whole(**batch), batch)
    expected.backward()
    out, wires = run_chain(stages, batch)
    loss = toy_loss(out, batch)
    run_backward(loss, wires)
    assert abs(loss - expected) <= 1e-12
    assert_same_gradients(stages, whole)


def test_names_of_the_hub(tmp_path, monkeypatch):
    """In one file of a folder that is named from here. GPT-2's file is one of the bare model; older BERTs call the norm's weights gamma and beta."""
    monkeypatch.chdir(tmp_path)
    for name, rename in {"gpt2": lambda n: n.removeprefix("transformer."),
                         "bert": lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
                             "LayerNorm.bias", "LayerNorm.beta")}.items():
        folder = tmp_path / name
        folder.mkdir()
        weights = toy(name, tied=True).state_dict()
        first = "transformer.wte.weight" if name == "gpt2" else "bert.embeddings.word_embeddings.weight"
        untied = {n: w for n, w in weights.items() if n == first or w.data_ptr() != weights[first].data_ptr()}
        save_file({rename(n): w.clone() for n, w in untied.items()}, folder / "model.safetensors")
        for stage in stages_on_meta(name, [1, 2], tied=True):
            load_weights(stage, name)
            same_parameters(stage, toy(name, tied=True))


def test_a_stage_opens_only_its_files(tmp_path, saved):
    folder = tmp_path / "part"
    shutil.copytree(saved("llama"), folder)
    with open(folder / "model.safetensors.index.json") as file:
        file_of = json.load(file)["weight_map"]
    first, last = stages_on_meta("llama", [1, 2])
    own = {file_of[name] for name, _ in first.model.named_parameters()}
    others = set(file_of.values()) - own
    assert own and others
    for name in others:
        (folder / name).unlink()
    load_weights(first, str(folder))
    with pytest.raises(ValueError, match=r"model-.*safetensors can't be read .No such file.*: copy it there anew"):
        load_weights(last, str(folder))


def test_weights_that_are_not_there(tmp_path, saved):
    stage, = stages_on_meta("gpt2-classifier", [3])
    with pytest.raises(ValueError, match=r"has no weights for score.weight of stage 0$"):
        load_weights(stage, saved("gpt2"))
    stage, = stages_on_meta("llama", [3])
    with pytest.raises(ValueError, match=r"the state dict has no weights for model.embed_tokens.weight of stage 0$"):
        load_weights(stage, {})
    (tmp_path / "pytorch_model.bin").touch()
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=rf"^{folder} has neither model.safetensors nor .*: name a directory"):
            load_weights(stage, str(folder))
    stage, = stages_on_meta("gpt2", [3], n_positions=64)
    with pytest.raises(ValueError, match=r"wpe.weight has the shape \(32, 32\) in .*of the model \(64, 32\)"):
        load_weights(stage, saved("gpt2"))


@pytest.mark.parametrize("name, changes, message", [
    ("gpt2", {}, "num_attention_heads=4 cannot be split over tp_size=3: use a tp_size that divides 4"),
    ("llama", dict(num_attention_heads=6, num_key_value_heads=2, hidden_size=48),
     "num_key_value_heads=2 cannot be split over tp_size=3"),
    ("gpt2", dict(n_head=3, n_embd=48, n_inner=50), "n_inner=50 cannot be split over tp_size=3"),
])
def test_sizes_that_tp_does_not_divide(name, changes, message, monkeypatch):
    monkeypatch.setattr(hf_tensor_parallel.pgm, "process_group_manager", Grid())
    with pytest.raises(ValueError, match=message):
        hf_tensor_parallel.apply_tensor_parallel(toy_on_meta(name, **changes))


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_models_that_tp_does_not_split(name, monkeypatch):
    monkeypatch.setattr(hf_tensor_parallel.pgm, "process_group_manager", Grid())
    message = "^Tensor parallelism for .* is not implemented, since it has no plan .*tp_size 1$"
    with pytest.raises(NotImplementedError, match=message):
        hf_tensor_parallel.apply_tensor_parallel(toy_on_meta(name))


def test_a_parameter_that_a_plan_leaves_out(monkeypatch):
    monkeypatch.setattr(hf_tensor_parallel.pgm, "process_group_manager", Grid())
    monkeypatch.setattr(hf_tensor_parallel, "LEFT_OUT", {})
    with pytest.raises(NotImplementedError, match="no style of mlp.act_fn.alpha_p, no style of mlp.act_fn.alpha_n. Use"):
        hf_tensor_parallel.apply_tensor_parallel(toy_on_meta("apertus", num_attention_heads=6, num_key_value_heads=3))


def test_files_that_have_several_parameters_as_one(monkeypatch):
    """Of a family whose published files have q, k and v as one, which transformers divides when it reads them."""
    whole = toy("opt")
    qkv = [f"self_attn.{letter}_proj" for letter in "qkv"]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model, **_: [
        WeightConverter("self_attn.qkv", qkv, operations=[Chunk(dim=0)])])
    state = whole.state_dict()
    names = [name for name in state if qkv[0] in name]
    for name in names:
        state[name.replace(qkv[0], "self_attn.qkv")] = torch.cat(
            [state.pop(name.replace(qkv[0], other)) for other in qkv])
    assert len(names) == 6 and not any(part in name for name in state for part in qkv)
    for stage in stages_on_meta("opt", [1, 2]):
        load_weights(stage, state)
        same_parameters(stage, whole)


def test_a_package_that_has_changed(monkeypatch, saved):
    """transformers loses a name that it never promised to keep: one error, with the versions that were tried."""
    monkeypatch.delattr(core_model_loading, "rename_source_key")
    monkeypatch.setattr("transformers.__version__", "9.9.0.dev1")
    message = (r"^transformers no longer has what is used of it \(cannot import name 'rename_source_key' .*: pip install "
               r"-c constraints.txt transformers \(transformers: this version, 9.9.0.dev1, is newer than those tried "
               r"\(5.17 to 5.\d+\)\)$")
    with pytest.raises(ValueError, match=message):
        load_weights(stages_on_meta("llama", [3])[0], saved("llama"))


class Grid:
    tp_world_size, tp_rank, ranks = 3, 0, [torch.tensor([[0, 1, 2]])]
