"""Weights and tokenizers in Hugging Face's layout, in a directory or on the Hub."""

import functools
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch

import process_group_manager as pgm
from models.names import name_function, their_name
from ranks.progress import progress
from stage_weights import load_weights, open_directory
from utils import UserError, require_reachable_hub


def published_weights(directory: str) -> Callable:
    """weights(stage, device), from a directory of Hugging Face's that is no checkpoint of ours: --init_from."""
    return functools.partial(load_stage, directory, open_directory(directory))


def load_stage(folder: str, source: dict[str, Callable], stage, device: torch.device) -> None:
    """Gives a stage its weights, each a slice that source[name]() opens in a folder. Raises UserError."""
    if name_function(stage) is their_name:
        ours = {*stage.model.state_dict(), *dict(stage.model.named_parameters(remove_duplicate=False)),
                *(stage.tied or ())}
        source = {name: source[their_name(name)] for name in ours if their_name(name) in source}
    numbers = sum(param.numel() for param in stage.model.parameters()) * pgm.process_group_manager.tp_world_size
    bar = progress("loading weights", total=numbers, by_all=True)

    def counted(open_slice: Callable):
        part = open_slice()
        bar.update(math.prod(part.get_shape()))
        return part

    try:
        with bar:
            load_weights(stage, {name: functools.partial(counted, each) for name, each in source.items()}, device)
    except UserError as error:
        raise UserError(f"the weights in {folder}: {error}") from None


TOKENIZER_FILES = ("*token*.json", "tokenizer.model", "vocab.*", "merges.txt", "*.tiktoken", "chat_template*",
                   "generation_config.json")


def read_tokenizer_files(model_name: str) -> dict[str, bytes]:
    """The content of the tokenizer's files of a directory or a Hub id, by name; of those that there are."""
    if not os.path.isdir(model_name):
        require_reachable_hub(model_name, "--model_name")
        from huggingface_hub import snapshot_download

        model_name = snapshot_download(model_name, allow_patterns=list(TOKENIZER_FILES))
    return {path.name: path.read_bytes() for pattern in TOKENIZER_FILES for path in Path(model_name).glob(pattern)
            if path.is_file()}
