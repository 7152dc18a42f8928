"""Published weights as people have them: what can't be read as it is meant is one error that names it, in step 9, in
cluster/ and where generate.py is one process, and never other weights in silence."""

import json
import shutil

import pytest
import torch
from lab.launch import MODELS, fork, modules_of
from safetensors.torch import load_file, save_file
from support.checkpoint_runs import SCRIPT, TEXT, flags_of, write_model
from support.refusals import end_of, require_refused
from transformers import LlamaConfig, LlamaForCausalLM, conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

with modules_of(9):
    from models.names import as_files_have_it
    from stage_weights import open_directory
    from utils import UserError

SIZES = dict(vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=4, head_dim=8, max_position_embeddings=64)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 6968588\n"
MATRIX = "model.layers.1.mlp.up_proj.weight"


def change(path, without: str = "", **new) -> None:
    tensors = {**load_file(path / "model.safetensors"), **new}
    tensors.pop(without, None)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


def quantize(path, dtype: torch.dtype) -> None:
    change(path, **{MATRIX: torch.ones(48, 32).to(dtype), f"{MATRIX}_scale_inv": torch.ones(1, 1)})


def pickle(path) -> None:
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()


KINDS = {  # name -> what is done to the model, what the error has where it is trained, and in generate.py
    "fp8, scales beside": (lambda path: quantize(path, torch.float8_e4m3fn), "(torch.float8_e4m3fn)", "is quantized"),
    "int8, scales beside": (lambda path: quantize(path, torch.int8), "is quantized (torch.int8)", "is quantized"),
    "a .bin": (pickle, "pytorch_model.bin, tokenizer.json", None),  # transformers reads it, without running its code
    "a .bin in parts": (lambda path: (path / "model.safetensors").rename(path / "pytorch_model.bin.index.json"),
                        "pytorch_model.bin.index.json, tokenizer.json", "can't be loaded"),
    "no head": (lambda path: change(path, "lm_head.weight"), "no weights for final_proj.weight", "lm_head.weight"),
    "a pointer": (lambda path: (path / "model.safetensors").write_text(POINTER), "Git LFS pointer", "Git LFS pointer"),
    "a tokenizer's pointer": (lambda path: (path / "tokenizer.json").write_text(POINTER), "tokenizer.json is a Git LFS",
                              "tokenizer.json is a Git LFS"),
    "the data's pointer": (lambda path: (path.parent / "text.txt").write_text(POINTER), "text.txt is a Git LFS", None),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    torch.manual_seed(0)
    return write_model(tmp_path_factory.mktemp("published") / "good", "llama", "float32", **SIZES)


def made(good, folder, name: str):
    model = shutil.copytree(good, folder / "model")
    (folder / "text.txt").write_text(TEXT * 9)
    KINDS[name][0](model)
    return model


@pytest.mark.parametrize("name", KINDS)
def test_a_training_refuses_what_it_can_not_read(good, tmp_path, name):
    flags = flags_of(tmp_path, "run", made(good, tmp_path, name), dataset_name=tmp_path / "text.txt", max_steps=1)
    require_refused(*end_of("cluster/train_distributed.py", 1, flags), KINDS[name][1])


@pytest.mark.parametrize("name", KINDS)
def test_one_process_writes_by_all_weights_or_not_at_all(good, tmp_path, name):
    code, said = end_of("cluster/generate.py", 1, ["--checkpoint", made(good, tmp_path, name), "--prompt", "We",
                                                   "--max_new_tokens", 2])
    if KINDS[name][2]:
        require_refused(code, said, KINDS[name][2])
    else:
        assert code == 0, said


def test_a_quantized_model_is_known_by_its_config(good, tmp_path):
    """In step 9 as well. One that is made anew, of that configuration, is not quantized, nor are its checkpoints."""
    model = shutil.copytree(good, tmp_path / "model")
    for how in "gptq", "awq", "bitsandbytes", "compressed-tensors", "mxfp4", "fp8":
        config = json.loads((good / "config.json").read_text()) | {"quantization_config": {"quant_method": how}}
        (model / "config.json").write_text(json.dumps(config))
        with pytest.raises(UserError, match=rf"model is quantized \({how}\), which is not read: take the model that "):
            open_directory(str(model))
    (tmp_path / "text.txt").write_text(TEXT * 9)
    fork(9, 1, *flags_of(tmp_path, "run", model, dataset_name=tmp_path / "text.txt", max_steps=1), "--from_scratch",
         script=SCRIPT, modules=MODELS)
    saved, = (tmp_path / "checkpoints" / "run").glob("step_*/config.json")
    assert "quantization_config" not in saved.read_text()


def test_parameters_that_published_files_have_as_one(monkeypatch):
    """A checkpoint keeps each under a name of its own: by the name that they share, the last would replace the others."""
    qkv = [f"self_attn.{letter}_proj" for letter in "qkv"]
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model, **_: [
        WeightConverter("self_attn.qkv", qkv, operations=[Chunk(dim=0)])])
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**SIZES))
    saved = [name for own, param in model.named_parameters() for name in as_files_have_it(model, own, "model")(param)]
    assert sorted(saved) == sorted(name for name, _ in model.named_parameters())
