"""Topologies of the steps, and chains of runs of train_distributed.py: the same seed draws the same ones."""

import math
import random

from support.checkpoint_runs import SIZES
from support.families import DECODERS, TOYS
from support.recordings import words

WORDS = 1024  # of the tokenizer
TP = {"tp_size": (1, 1, 1, 2, 2, 3, 4)}
DP = {**TP, "dp_size": (1, 2, 2, 3, 4)}
PP = {**DP, "pp_size": (1, 2, 2, 3, 4)}
EIGHT = {**PP, "pp_engine": ("afab", "1f1b"), "recompute": (True, False)}
CHUNKS = {**EIGHT, "pp_engine": ("afab", "1f1b", "zb", "interleaved", "interleaved_zb"), "virtual_stages": (2, 2, 3)}
ZERO = {"zero": (0, 1, 2, 3, 3), "shard_size": (1, 2, 3, 4), "gather_once": (True, False)}
STEPS = {4: TP, 5: DP, 6: DP, 7: PP, 8: EIGHT, 9: EIGHT,  # step -> values of its flags; a size multiplies the ranks
         10: {**PP, "pp_engine": ("afab", "1f1b", "zb", "zb"), "recompute": (True, False)},
         11: {**CHUNKS, "pp_size": (2, 2, 3, 4)},
         12: {**CHUNKS, "dp_size": (2, 3, 4), "zero": (1, 2, 2)},
         13: {**CHUNKS, "dp_size": (2, 3, 4, 4), **ZERO, "zero": (1, 2, 3, 3, 3)},
         14: {**PP, "tp_size": (2, 2, 3, 4), "pp_engine": ("1f1b", "zb"), **ZERO, "sequence_parallel": (True,)},
         15: {**PP, "cp_size": (2, 2, 3, 4), "cp_layout": ("zigzag", "zigzag", "contiguous"), "pp_size": (1, 1, 2),
              "pp_engine": ("1f1b", "zb"), **ZERO, "sequence_parallel": (True, False)},
         16: {**CHUNKS, "tp_size": (1, 1, 2), "dp_size": (1, 2, 3, 4), "pp_size": (1, 1, 2), "cp_size": (1, 1, 1, 2),
              **ZERO, "sequence_parallel": (True, False), "num_experts": (4, 6, 12, 12), "experts_per_token": (1, 2),
              "balance_bias": (0, 0.01)},
         18: {**CHUNKS, "tp_size": (1, 2, 2, 3), "zero": (1, 2), "optimizer": ("muon",)}}


def parts(rng: random.Random, total: int, count: int) -> list[int]:
    """`count` positive numbers whose sum is `total`."""
    cuts = [0, *sorted(rng.sample(range(1, total), count - 1)), total]
    return [after - before for before, after in zip(cuts, cuts[1:])]


def unlike(rng: random.Random, layers: int, pipelines: int, stages: int, samples: int) -> tuple[int, dict]:
    """The number of stages, and flags: pipelines with up to so many of them share a step's micro-batches."""
    shapes = [parts(rng, layers, rng.randint(1, stages)) for _ in range(pipelines)]
    return sum(map(len, shapes)), {
        "pipelines": ";".join(",".join(map(str, shape)) for shape in shapes),
        "num_microbatches": ",".join(map(str, parts(rng, samples, pipelines)))}


def topology(seed: int) -> tuple[dict, int, int, list, list]:
    """The shape of the model, the step, its ranks and flags, and those of one process that computes the same."""
    rng, step, ranks = random.Random(f"topology {seed}"), list(STEPS)[seed % len(STEPS)], 0
    while not 2 <= ranks <= 8:
        flags = {name: rng.choice(values) for name, values in STEPS[step].items()}
        tp, dp, pp, cp = (flags.get(f"{axis}_size", 1) for axis in ("tp", "dp", "pp", "cp"))
        if dp * cp == 1:
            flags.pop("zero", None)
        if tp == 1:
            flags.pop("sequence_parallel", None)
        shards = flags.get("shard_size", 1) if flags.get("zero") else 1
        if shards == 1 or dp * cp % shards:
            flags.pop("shard_size", None)
            shards = dp * cp
        if flags.get("zero") and rng.random() < 0.5:
            flags["zero_shares"] = ",".join(str(rng.randint(1, 5)) for _ in range(shards))
        if flags.get("zero") != 3:
            flags.pop("gather_once", None)
        if pp == 1 or not flags.get("pp_engine", "interleaved").startswith("interleaved"):
            flags.pop("virtual_stages", None)
        if pp == 1:
            flags.pop("pp_engine", None)
        layers = pp * flags.get("virtual_stages", 1) + rng.randint(1, 3)
        count, ranks = dp * rng.choice((1, 2, 2, 3, 4, 5)), 1
        if step == 9 and rng.random() < 0.7:
            count += rng.randrange(3)
            ranks, shapes = unlike(rng, layers, flags.pop("dp_size"), flags.pop("pp_size"), count)
            flags |= shapes
        else:
            flags["gradient_accumulation_steps"] = count // dp
        ranks *= math.prod(value for name, value in flags.items() if name in ("tp_size", "dp_size", "pp_size", "cp_size"))
    names = "num_experts", "experts_per_token", "balance_bias", "optimizer"
    of_model = {name: flags[name] for name in names if name in flags}
    if "num_experts" in flags:
        divisors = [size for size in (1, 2, 3, 4) if math.gcd(dp, flags["num_experts"]) % size == 0]
        flags["ep_size"] = rng.choice(divisors + 2 * divisors[-1:])
    heads, groups = tp * rng.choice((1, 2, 3)), rng.choice((1, 1, 2))
    model = {"num_hidden_layers": layers, "num_attention_heads": heads * groups, "num_key_value_heads": heads,
             "head_dim": rng.choice((2, 4, 6)), "hidden_size": heads * groups * rng.randint(1, 6),
             "intermediate_size": tp * rng.randint(3, 12), "vocab_size": rng.randrange(WORDS, WORDS + 9),
             "tie_word_embeddings": rng.random() < 0.5}
    size, num_steps = rng.choice((1, 2, 3)), rng.randint(2, 4)
    seq_len = rng.choice((1, 3, 8, 13)) * (2 * cp * tp if cp > 1 else tp if "sequence_parallel" in flags else 1)
    both = {"seq_len": seq_len, "seed": rng.randrange(1000), "dtype": "float64",
            "max_grad_norm": rng.choice((0, 0.1, 1, 100)), "warmup_steps": rng.choice((0, 0, 1, 9)),
            "lr_decay": rng.choice(("none", "cosine"))}
    both["max_tokens"] = num_steps * count * size * both["seq_len"] + rng.randrange(count * size)
    flags |= {**both, "micro_batch_size": size}
    alone = {**both, **of_model, "micro_batch_size": count * size, "gradient_accumulation_steps": 1}
    return model, step, ranks, words(flags), words(alone)


def chain(seed: int) -> tuple[dict, dict, dict, list]:
    """The kind and shape of the model, flags of all runs, those of one process, and links: the ranks, flags and end of
    a run, and the rank that gets Ctrl-C then (-1: each rank; None: --max_steps)."""
    rng = random.Random(f"chain {seed}")  # numbers that are near each other begin alike
    lora, layers, num_steps, samples = rng.random() < 0.4, rng.randint(3, 5), rng.randint(3, 6), 8
    family = rng.choice((*DECODERS, *(() if lora else 9 * (None,))))  # our Llama has no adapters
    model = {**(TOYS[family][1] if family else SIZES), "kind": family and family.replace("-", "_"),
             "dtype": "float64" if lora else None, "vocab_size": WORDS, "initializer_range": 0.1,
             "tie_word_embeddings": family != "mixtral" and rng.random() < 0.5,
             "n_layer" if family == "gpt2" else "num_hidden_layers": layers}
    ends, links = [*sorted(rng.sample(range(1, num_steps), rng.choice((0, 1, 1, 2, 2)))), num_steps], []
    for end in ends:
        ranks = 0
        while not rng.choice((1, 2, 2)) <= ranks <= 4:  # the loss of Mixtral's router depends on what a micro-batch is
            size, tp = 2 if family == "mixtral" else rng.choice((1, 2)), 1 if lora else rng.choice((1, 1, 2))
            stages, flags = unlike(rng, layers, rng.randint(1, 3), 3, samples // size)
            ranks = tp * stages
        stopped = rng.choice((None, -1, rng.randrange(ranks))) if end < num_steps else None
        flags |= {"batch_size": size, "tp_size": tp, "pp_engine": rng.choice(("afab", "1f1b", "1f1b-2")),
                  "max_steps": end if stopped is None else num_steps}
        links.append((ranks, flags, end, stopped))
    decays = all(stopped is not None for *_, stopped in links[:-1])  # its end depends on --max_steps
    both = {"dataset_name": rng.choice(("corpus", "answers.jsonl")), "seq_len": rng.choice((9, 16, 24)),
            "seed": rng.randrange(1000), "max_steps": num_steps, "save_every": rng.choice((None, 1, 2)),
            "warmup_steps": rng.choice((0, 2)), "lr_decay": rng.choice(("none", "cosine")) if decays else "none",
            "max_grad_norm": rng.choice((0, 0.1, 1)), "learning_rate": 3e-3, "validation_split": 0.2,
            "eval_every": rng.choice((0, 1, 2)), "packing": rng.choice(("auto", "on")),
            "lora_rank": 2 if lora else None}
    size = 2 if family == "mixtral" else samples
    return model, both, {"num_microbatches": samples // size, "batch_size": size, "eval_every": 1}, links
