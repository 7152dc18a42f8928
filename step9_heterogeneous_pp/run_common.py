"""What the run_*.py scripts share: flags, a model with its weights, text, and the training loop with a progress bar."""

import argparse
import contextlib
import os
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import process_group_manager as pgm
from dataloader import TokenSamples, load_tokens
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from utils import (
    ROOT, TINY_LLAMA, ArgumentParser, once_per_machine, one_clear_error, positive_int, require_reachable_hub,
)

CACHE = os.path.join(ROOT, "runs", "token_cache")


@contextlib.contextmanager
def clear_errors():
    """Around main(): one_clear_error, also for what is not implemented and the two AssertionErrors of set_pipelines.

    Any other assertion is a fault of ours, and keeps its traceback.
    """
    with one_clear_error():
        try:
            yield
        except NotImplementedError as error:
            raise ValueError(str(error)) from None
        except AssertionError as error:
            if str(error).startswith(("Number of ranks in pipeline templates", "All pipelines must have")):
                raise ValueError(str(error)) from None
            raise


def parse_args(doc: str, learning_rate: float = 1e-3, seq_len: int = 64) -> argparse.Namespace:
    parser = ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--model_name_or_path", help="a directory, or a Hub id (default: a toy with random weights)")
    parser.add_argument("--steps", type=positive_int, default=20, help="optimizer steps")
    parser.add_argument("--microbatch_size", type=positive_int, default=4)
    parser.add_argument("--learning_rate", type=float, default=learning_rate)
    parser.add_argument("--seq_len", type=positive_int, default=seq_len, help="tokens in a sample of text")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp64"], default="fp32")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def load_model(model_class: type, toy: dict, args) -> tuple[nn.Module, str | None]:
    """The toy with random weights; or, of --model_name_or_path, shapes only and the directory with its safetensors."""
    if args.model_name_or_path is None:
        torch.manual_seed(args.seed)
        return model_class(model_class.config_class(**toy)), None
    directory = once_per_machine(lambda: local_directory(args.model_name_or_path))
    config = model_class.config_class.from_pretrained(directory)
    config.num_labels = toy.get("num_labels", config.num_labels)
    with torch.device("meta"):
        return model_class(config), directory


def local_directory(name_or_path: str, flag: str = "--model_name_or_path") -> str:
    """The directory itself, or the Hub's files, downloaded."""
    if os.path.isdir(name_or_path):
        return name_or_path
    require_reachable_hub(name_or_path, flag)
    from huggingface_hub import snapshot_download

    return snapshot_download(name_or_path, allow_patterns=["*.json", "*.safetensors", "*.txt", "tokenizer*"])


def speeches(plugin: HeterogeneousParallelPlugin, args, vocab_size: int) -> TokenSamples:
    """Samples of seq_len + 1 tokens of the State of the Union speeches, by the model's tokenizer or the toy's."""
    num_tokens = args.steps * plugin.global_batch_size * args.seq_len
    return text_samples("sotu", args.model_name_or_path or TINY_LLAMA, args.seq_len, vocab_size, num_tokens)


def text_samples(dataset_name: str, tokenizer: str, seq_len: int, vocab_size: int, num_tokens: int) -> TokenSamples:
    """Samples of the corpus' first `num_tokens` tokens and one more, or of all it has. Collective.

    Raises ValueError where there is not one sample, or where the tokenizer is not the model's.
    """
    tokens = load_tokens(dataset_name, tokenizer, num_tokens + 1, CACHE)
    if len(tokens) < seq_len + 1:
        raise ValueError(f"{dataset_name!r} holds {len(tokens)} tokens, fewer than the --seq_len {seq_len} + 1 of a "
                         "sample: choose a smaller one, or a larger corpus")
    if (largest := int(tokens.max())) >= vocab_size:
        raise ValueError(f"the tokenizer of {tokenizer!r} gives the id {largest}, but the model's vocab_size is "
                         f"{vocab_size}: the two do not belong together")
    return TokenSamples(tokens, seq_len)


def check_positions(config, seq_len: int) -> None:
    """Raises ValueError where a model has fewer positions than a sample has tokens."""
    positions = getattr(config, "max_position_embeddings", seq_len)
    if positions < seq_len:
        raise ValueError(f"--seq_len {seq_len} is more than the {positions} positions of the model: "
                         f"use {positions} or less")


class Numbered(torch.utils.data.Dataset):
    """`count` items of a data set without an end."""

    def __init__(self, items, count: int):
        self.items, self.count = items, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int):
        return self.items[i]


def next_tokens(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    tokens = torch.stack(samples)  # (B, T + 1)
    return {"input_ids": tokens[:, :-1].contiguous(), "target_ids": tokens[:, 1:].contiguous()}


def next_token_loss(output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = output.logits.flatten(0, 1)  # (B*T, V)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch["target_ids"].flatten())


def class_loss(output, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = output.logits  # (B, classes)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), batch["targets"])


def train(plugin: HeterogeneousParallelPlugin, model: nn.Module, weights: str | None, dataset, collate: Callable,
          criterion: Callable, args, new_modules: tuple[str, ...] = ()) -> list[float]:
    """The training loop. Returns the loss of each step, the mean over the global batch."""
    from tqdm import tqdm

    count = args.steps * plugin.global_batch_size
    dataloader = plugin.prepare_dataloader(Numbered(dataset, count), collate_fn=collate)
    check_positions(model.config, args.seq_len)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    model, optimizer, dataloader = plugin.configure(model, optimizer, dataloader, weights, new_modules, args.seed)
    grid = pgm.process_group_manager
    if grid.global_rank == 0:
        print(grid.describe(), flush=True)
    batches, losses = iter(dataloader), []
    with tqdm(total=dataloader.steps_per_epoch, unit="step", disable=grid.global_rank > 0) as bar:
        for _ in range(dataloader.steps_per_epoch):
            losses.append(plugin.execute_pipeline(batches, model, criterion, optimizer).item())
            optimizer.step()
            bar.set_postfix_str(f"loss {losses[-1]:.4f}")
            bar.update()
    if grid.global_rank == 0:
        print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}", flush=True)
    dist.destroy_process_group()
    return losses
