"""Our Llama as a directory that Hugging Face's LlamaForCausalLM.from_pretrained reads.

    config.json  model.safetensors  and the tokenizer's files, where the model came from a directory that has them

The directory appears under its name in one go, when all of it is on disk: what has the name is a whole checkpoint.
"""

import glob
import json
import os
import re
import shutil

import torch
from safetensors.torch import save_file

THEIR_NAMES = (  # ours -> Hugging Face's
    (r"^embedding\.", "model.embed_tokens."),
    (r"^decoder_layers\.", "model.layers."),
    (r"^final_norm\.", "model.norm."),
    (r"^final_proj\.", "lm_head."),
    (r"\.attention\.out_proj\.", ".self_attn.o_proj."),
    (r"\.attention\.", ".self_attn."),
)


def their_name(name: str) -> str:
    for pattern, replacement in THEIR_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def save_hugging_face(model: torch.nn.Module, model_name: str, directory: str) -> None:
    """Writes the whole `model` in the dtype of its parameters; a tied projection once, under the embedding's name.

    `model_name`: the directory of its tokenizer, or a Hub id. What was at `directory` before is replaced.
    """
    weights = {their_name(name): param.detach().cpu().contiguous() for name, param in model.named_parameters()}
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    unfinished = f"{directory}.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    os.makedirs(unfinished)
    save_file(weights, os.path.join(unfinished, "model.safetensors"), metadata={"format": "pt"})
    with open(os.path.join(unfinished, "config.json"), "w") as file:
        json.dump({**vars(model.config), "architectures": ["LlamaForCausalLM"], "dtype": dtype}, file, indent=2)
    for path in glob.glob(os.path.join(glob.escape(model_name), "*token*.json")):
        shutil.copy(path, unfinished)
    for name in os.listdir(unfinished):
        with open(os.path.join(unfinished, name)) as file:
            os.fsync(file.fileno())
    shutil.rmtree(old := f"{directory}.old", ignore_errors=True)
    if os.path.isdir(directory):  # a rerun's: a directory can't take the name of one that has files
        os.replace(directory, old)
    os.replace(unfinished, directory)
    shutil.rmtree(old, ignore_errors=True)
