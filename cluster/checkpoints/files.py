"""The files of a checkpoint: written in one pass with a checksum, and read only after they were found to be whole.

    step_00000120/
        config.json  generation_config.json  tokenizer.json ...   the model's, as Hugging Face has them
        model-00001-of-00002.safetensors                           the weights of pipeline stage 1, of 2
        model.safetensors.index.json                               which weight is in which file
        optimizer-00001-of-00002.safetensors                       AdamW's averages, by the same names
        optimizer.safetensors.index.json
        state.json                                                 the step, flags, rows of metrics, a checksum a file

A safetensors file is the length of its header (8 bytes), the header, which is JSON, and then the tensors' bytes, one
tensor after the other: https://huggingface.co/docs/safetensors. No file of a checkpoint is a pickle, so reading one
runs no code.
"""

import json
import os
import re
import shutil
import zlib

import torch
from safetensors.torch import load_file, save

from ranks.files import File, facts_of, read_json, replace, sync_folder, write

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
          torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
          torch.bool: "BOOL"}
INDEX = "{}.safetensors.index.json"
STATE = "state.json"
KINDS = ("model", "optimizer")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's


def name_of_step(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int:
    """The step of a checkpoint's folder, -1 for other names."""
    found = re.fullmatch(r"step_(\d+)", name)
    return int(found[1]) if found else -1


class TensorFile(File):
    """A safetensors file that is written tensor by tensor, in the order of `entries`: by name, tensors like these."""

    def __init__(self, path: str, entries: dict[str, torch.Tensor]):
        super().__init__(path)
        header, position = {"__metadata__": {"format": "pt"}}, 0
        for name, tensor in entries.items():
            end = position + tensor.nbytes
            header[name] = {"dtype": DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [position, end]}
            position = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.put(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: torch.Tensor) -> None:
        self.put(tensor.contiguous().flatten().view(torch.uint8).numpy())


def checksum_of(state: dict) -> str:
    return f"{zlib.crc32(json.dumps(state, indent=1).encode()):08x}"


def write_state(path: str, state: dict) -> None:
    """state.json, with a checksum of its own. It appears in one go. Raises OSError."""
    replace(path, json.dumps({"crc32": checksum_of(state), **state}, indent=1))


def read_state(path: str) -> dict:
    """The content of a state.json. Raises UserError for a file that is not what write_state wrote."""
    return read_json(path, check_state)


def check_state(state: dict) -> dict:
    """The state without its checksum. Raises errors where it is not whole."""
    if state.pop("crc32") != checksum_of(state):
        raise ValueError("its checksum is not that of its content")
    maps = (state["parameters"], *(state[f"{kind}_map"] for kind in KINDS))
    if unknown := {file for each in maps for file in each.values()} - state["files"].keys():
        raise ValueError(f"it names {sorted(unknown)[0]}, of which it has no checksum")
    return state


def check_file(folder: str, name: str, facts: dict) -> str | None:
    """What is wrong with a file of a checkpoint, or None."""
    path = os.path.join(folder, name)
    if os.path.basename(name) != name or os.path.islink(path):
        return f"{path} is not a file of that folder"
    if not os.path.isfile(path):
        return f"{path} is missing"
    if (size := os.path.getsize(path)) != facts["bytes"]:
        return f"{path} has {size} bytes instead of {facts['bytes']}"
    if facts_of(path)["crc32"] != facts["crc32"]:
        return f"{path} has another checksum than when it was written"
    return None


def merge(parts: list[dict]) -> dict:
    """What state.json says of the files that several ranks wrote."""
    return {key: {name: value for part in parts for name, value in part[key].items()}
            for key in ("files", "parameters", *(f"{kind}_map" for kind in KINDS))}


def write_small(folder: str, small: dict[str, bytes], merged: dict) -> dict[str, dict]:
    """Writes configuration, tokenizer and the indices; adapters have none. Returns the files' facts. Raises OSError."""
    small = dict(small)
    for kind in KINDS if ADAPTER_CONFIG not in small else ():
        size = sum(facts["bytes"] for name, facts in merged["files"].items() if name.startswith(f"{kind}-"))
        index = {"metadata": {"total_size": size}, "weight_map": merged[f"{kind}_map"]}
        small[INDEX.format(kind)] = json.dumps(index, indent=1).encode()
    return {name: write(os.path.join(folder, name), content) for name, content in small.items()}


def copy_into_one(folder: str, names: list[str], joined: str) -> None:
    """Copies the tensors of several safetensors files of a folder into one. Raises OSError."""
    tensors = {}
    for name in names:
        tensors |= load_file(os.path.join(folder, name))
    write(os.path.join(folder, joined), save(tensors, {"format": "pt"}))


def set_latest(folder: str, name: str) -> None:
    """Moves `latest` in one go."""
    replace(os.path.join(folder, "latest"), f"{name}\n")
    sync_folder(folder)


def read_latest(folder: str) -> str:
    """What `latest` in a folder says, or "" if there is none that can be read."""
    try:
        with open(os.path.join(folder, "latest"), encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def forget_older(folder: str, step: int, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints up to `step`."""
    older = sorted((name for name in os.listdir(folder) if 0 <= step_of(name) <= step), key=step_of)
    for name in older[:-keep]:
        doomed = os.path.join(folder, f"{name}.unfinished")  # a name that is removed later, if this run is killed now
        os.replace(os.path.join(folder, name), doomed)
        shutil.rmtree(doomed, ignore_errors=True)
