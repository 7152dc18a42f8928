"""The files of a checkpoint: written in one pass with a checksum, and read only after they were found to be whole.

    step_00000120/
        config.json  generation_config.json  tokenizer.json ...   the model's, as Hugging Face has them
        model-00001-of-00002.safetensors                           the weights of pipeline stage 1, of 2
        model.safetensors.index.json                               which weight is in which file
        optimizer-00001-of-00002.safetensors                       AdamW's averages, by the same names
        optimizer.safetensors.index.json
        state.json                                                 the step, the place in the data, a checksum a file

A safetensors file is the length of its header (8 bytes), the header, which is JSON, and then the tensors' bytes, one
tensor after the other: https://huggingface.co/docs/safetensors. No file of a checkpoint is a pickle, so reading one
runs no code.
"""

import contextlib
import glob
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable

import numpy as np
import torch
from safetensors.torch import load_file, save

from utils import UserError, require_reachable_hub

CHUNK = 8 << 20  # bytes that are read or sent at a time
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
          torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
          torch.bool: "BOOL"}
INDEX = "{}.safetensors.index.json"
STATE = "state.json"
KINDS = ("model", "optimizer")
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"  # peft's
TOKENIZER_FILES = ("*token*.json", "tokenizer.model", "vocab.*", "merges.txt", "*.tiktoken", "chat_template*",
                   "generation_config.json")


def name_of_step(step: int) -> str:
    return f"step_{step:08d}"


def step_of(name: str) -> int:
    """The step of a checkpoint's folder, -1 for other names."""
    found = re.fullmatch(r"step_(\d+)", name)
    return int(found[1]) if found else -1


class File:
    """A file that is written piece by piece, with a checksum, into a folder that is made if need be.

    An error of the disk is raised by close() alone: put() does nothing after it, so that those that send the pieces
    need not know.
    """

    def __init__(self, path: str):
        self.path, self.size, self.checksum, self.error, self.file = path, 0, 0, None, None
        with self.keeping_errors():
            os.makedirs(os.path.dirname(path), exist_ok=True)
            self.file = open(path, "wb", buffering=0)

    @contextlib.contextmanager
    def keeping_errors(self):
        try:
            yield
        except OSError as error:
            error.filename = self.path
            self.error = self.error or error

    def put(self, data) -> None:
        """`data`: bytes, or what has them."""
        left = memoryview(data).cast("B")
        with self.keeping_errors():
            if self.error is None:
                self.size, self.checksum = self.size + len(left), zlib.crc32(left, self.checksum)
                while len(left):  # a full disk may take a part of it first
                    left = left[self.file.write(left):]

    def close(self) -> dict:
        """Waits until all is on the disk. Returns the facts that state.json has about a file. Raises OSError."""
        with self.keeping_errors():
            if self.file:
                with self.file:
                    os.fsync(self.file.fileno())
        if self.error:
            raise self.error
        return {"bytes": self.size, "crc32": f"{self.checksum:08x}"}


class TensorFile(File):
    """A safetensors file that is written tensor by tensor, in the order of `entries`: name -> (dtype, shape)."""

    def __init__(self, path: str, entries: dict[str, tuple[torch.dtype, Iterable[int]]]):
        super().__init__(path)
        header, position = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape) in entries.items():
            end = position + int(np.prod(list(shape), dtype=np.int64)) * dtype.itemsize
            header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [position, end]}
            position = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.put(len(text).to_bytes(8, "little") + text)

    def write(self, tensor: torch.Tensor) -> None:
        self.put(tensor.contiguous().flatten().view(torch.uint8).numpy())


def write(path: str, content: bytes) -> dict:
    """Writes the file and waits until it is on the disk. Returns its facts. Raises OSError."""
    file = File(path)
    file.put(content)
    return file.close()


def replace(path: str, text: str) -> None:
    """Writes a file that appears under its name in one go. Raises OSError."""
    write(f"{path}.unfinished", text.encode())
    os.replace(f"{path}.unfinished", path)


def facts_of(path: str) -> dict:
    """As File.close() returns them, of a file that is there."""
    size = checksum = 0
    with open(path, "rb", buffering=0) as file:
        while part := file.read(CHUNK):
            size, checksum = size + len(part), zlib.crc32(part, checksum)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def sync_folder(path: str) -> None:
    """Waits until the names in a folder are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_state(path: str, state: dict) -> None:
    """state.json, with a checksum of its own. It appears in one go. Raises OSError."""
    checksum = f"{zlib.crc32(json.dumps(state, indent=1).encode()):08x}"
    replace(path, json.dumps({"crc32": checksum, **state}, indent=1))


def read_state(path: str) -> dict:
    """The content of a state.json. Raises UserError for a file that is not what write_state wrote."""
    return read_json(path, check_state)


def read_json(path: str, check: Callable):
    """What check() makes of the content of a JSON file. Raises UserError where it is not as check() needs it."""
    try:
        with open(path, encoding="utf-8") as file:
            return check(json.load(file))
    except UserError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} can't be read ({type(error).__name__}: {error})") from None


def check_state(state: dict) -> dict:
    """The state without its checksum. Raises errors where it does not have what a checkpoint needs."""
    if state.pop("crc32") != f"{zlib.crc32(json.dumps(state, indent=1).encode()):08x}":
        raise ValueError("its checksum is not that of its content")
    maps = [state["parameters"], *(state[f"{kind}_map"] for kind in KINDS)]
    facts = [(each["bytes"], each["crc32"]) for each in state["files"].values()]
    groups, counts = state["optimizer"]["param_groups"], [state[name] for name in ("step", "global_batch", "seq_len")]
    fits = all(type(size) is int and type(checksum) is str for size, checksum in facts)
    fits = fits and all(file in state["files"] for each in maps for file in each.values())
    fits = fits and all(type(count) is int and count >= 0 for count in counts)
    fits = fits and type(state["seed"]) is int and all(type(name) is str for name in state["names"])
    if not fits or not all(isinstance(each, dict) for each in (state["scheduler"], state["flags"], *groups)):
        raise ValueError("it has other fields than a checkpoint")
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


def read_index(path: str) -> dict[str, str]:
    """The weight_map of an index: parameter -> file. Raises UserError for one that names files of other folders."""
    def check(index: dict) -> dict[str, str]:
        names = {*index["weight_map"].values()}
        if outside := [name for name in names if os.path.basename(name) != name or name in ("", ".", "..")]:
            raise UserError(f"{path} names {outside[0]!r}, which is not a file of that folder: take this checkpoint "
                            "from where it was made")
        return index["weight_map"]

    return read_json(path, check)


def read_tokenizer_files(model_name: str) -> dict[str, bytes]:
    """The content of the tokenizer's files of a directory or a Hub id, by name; of those that there are."""
    if not os.path.isdir(model_name):
        require_reachable_hub(model_name, "--model_name")
        from huggingface_hub import snapshot_download

        model_name = snapshot_download(model_name, allow_patterns=list(TOKENIZER_FILES))
    contents = {}
    for pattern in TOKENIZER_FILES:
        for path in glob.glob(os.path.join(glob.escape(model_name), pattern)):
            if os.path.isfile(path):
                with open(path, "rb") as file:
                    contents[os.path.basename(path)] = file.read()
    return contents


def merge(parts: list[dict]) -> dict:
    """What several ranks wrote, as if one had: the files of all of them, and the other fields of the first."""
    files = {"files": {}, **{f"{kind}_map": {} for kind in KINDS}, "parameters": {}}
    for part in parts:
        for key, found in files.items():
            found.update(part[key])
    return {**(parts[0] if parts else {}), **files}


def write_small(folder: str, small: dict[str, bytes], merged: dict) -> dict[str, dict]:
    """Writes configuration, tokenizer and the indices; adapters have none. Returns the files' facts. Raises OSError."""
    small = dict(small)
    for kind in KINDS if ADAPTER_CONFIG not in small else ():
        size = sum(facts["bytes"] for name, facts in merged["files"].items() if name.startswith(f"{kind}-"))
        index = {"metadata": {"total_size": size}, "weight_map": merged[f"{kind}_map"]}
        small[INDEX.format(kind)] = json.dumps(index, indent=1).encode()
    return {name: write(os.path.join(folder, name), content) for name, content in small.items()}


def join_files(folder: str, names: list[str], joined: str) -> None:
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
