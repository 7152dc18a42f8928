"""Topologies of the steps, and chains of runs of train_distributed.py, that chance has drawn: a seed draws the same ones.

    topology(seed)      a run of a step's train.py over several ranks, and the run of one process that equals it
    chain(seed)         runs that each go on where the one before has ended, and the run that is not stopped
"""

import random
from typing import NamedTuple

from checkpoint_runs import SIZES as OURS
from families import DECODERS, TIED, TOYS

MAX_RANKS, WORDS = 8, 300  # ranks of a run; all ids of the corpus are smaller
SIZES = 1, 1, 1, 2, 2, 3, 4
TP = {"tp_size": SIZES}
DP = {**TP, "dp_size": SIZES}
PP = {**DP, "pp_size": SIZES}
EIGHT = {**PP, "pp_engine": ("afab", "1f1b"), "recompute": (True, False)}
STEPS = {  # step -> its flags besides those of step 3, and their values: a size multiplies the ranks
    4: TP, 5: DP, 6: DP, 7: PP, 8: EIGHT, 9: EIGHT, 10: {**EIGHT, "pp_engine": ("afab", "1f1b", "zb", "zb")},
}
IMPOSSIBLE = 0.05  # of the topologies with sizes that can't be had


class Topology(NamedTuple):
    step: int
    ranks: int
    flags: list
    one: list  # the flags of one process of step 3 that computes the same
    model: dict  # its configuration, as far as it is not the tiny Llama's
    error: str | None  # which has to come


class Link(NamedTuple):
    """A run of a chain. `flags`: of its topology. It ends after step `end`, by Ctrl-C on `stopped`: a rank, or -1: all."""

    ranks: int
    flags: list
    end: int
    stopped: int | None
    resume_auto: bool


class Chain(NamedTuple):
    family: str | None  # of transformers; None: our Llama
    model: dict
    is_chat: bool
    flags: dict  # of all runs
    one: list  # further ones of the run that is not stopped
    links: list[Link]


def parts(rng: random.Random, total: int, count: int) -> list[int]:
    """`count` positive numbers whose sum is `total`."""
    cuts = [0, *sorted(rng.sample(range(1, total), count - 1)), total]
    return [after - before for before, after in zip(cuts, cuts[1:])]


def words_of(flags: dict) -> list:
    """On the command line: a switch that is off is not there."""
    given = {name: value for name, value in flags.items() if value is not None and value is not False}
    return [word for name, value in given.items() for word in [f"--{name}", value][: 1 + (value is not True)]]


def topology(seed: int) -> Topology:
    rng = random.Random(seed)
    step, ranks = rng.choice(list(STEPS)), 0
    while not 2 <= ranks <= MAX_RANKS:
        flags, ranks = {name: rng.choice(values) for name, values in STEPS[step].items()}, 1
        tp, dp, pp = (flags.get(f"{axis}_size", 1) for axis in ("tp", "dp", "pp"))
        counts, layers = [rng.choice((1, 2, 2, 3, 4, 5))] * dp, rng.randint(max(pp, 2), pp + 3)
        if step == 9 and rng.random() < 0.7:
            shapes = [parts(rng, layers, rng.randint(1, pp)) for _ in range(dp)]
            counts = [rng.randint(1, 5) for _ in range(dp)]
            ranks = sum(map(len, shapes)) * tp
            flags |= {"dp_size": None, "pp_size": None, "num_microbatches": ",".join(map(str, counts)),
                      "pipelines": ";".join(",".join(map(str, shape)) for shape in shapes)}
        else:
            ranks, flags["gradient_accumulation_steps"] = tp * dp * pp, counts[0]
    key_value_heads = tp * rng.choice((1, 1, 2))
    heads = key_value_heads * rng.choice((1, 2, 3))
    model = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": key_value_heads,
             "head_dim": rng.choice((2, 4, 6)), "hidden_size": heads * rng.randint(1, 6),
             "intermediate_size": tp * rng.randint(3, 12), "vocab_size": WORDS + rng.randrange(100),
             "tie_word_embeddings": rng.random() < 0.5}
    error = None
    if rng.random() < IMPOSSIBLE and (tp > 1 or pp > 1 and not flags.get("pipelines")):
        error = "cannot be split over tp_size" if tp > 1 else "stage"
        model.update({"intermediate_size": tp * 5 + 1} if tp > 1 else {"num_hidden_layers": pp - 1})
    num_steps, size = rng.randint(2, 4), rng.choice((1, 2, 3))
    both = {"seq_len": rng.choice((1, 3, 8, 13)), "seed": rng.randrange(1000), "dtype": "float64",
            "max_grad_norm": rng.choice((0, 0.1, 1, 100)), "warmup_steps": rng.choice((0, 0, 1, 9)),
            "lr_decay": rng.choice(("none", "cosine")), "num_workers": rng.choice((0,) * 9 + (1,))}
    samples = size * sum(counts)
    both["max_tokens"] = num_steps * samples * both["seq_len"] + rng.randrange(samples)
    one = words_of({**both, "num_workers": 0, "micro_batch_size": samples, "gradient_accumulation_steps": 1})
    return Topology(step, ranks, words_of({**both, **flags, "micro_batch_size": size}), one, model, error)


def layout(rng: random.Random, layers: int, samples: int, sizes: tuple, tp_sizes: tuple) -> tuple[int, list]:
    """Ranks and flags: pipelines of `layers` that share the samples of a step."""
    ranks = 5
    while ranks > 4:
        size, tp = rng.choice(sizes), rng.choice(tp_sizes)
        shapes = [parts(rng, layers, rng.randint(1, 3)) for _ in range(rng.randint(1, 3))]
        ranks = tp * sum(map(len, shapes))
    pipelines = ";".join(",".join(map(str, shape)) for shape in shapes)
    shares = ",".join(map(str, parts(rng, samples // size, len(shapes))))
    return ranks, words_of({"pipelines": pipelines, "num_microbatches": shares, "batch_size": size, "tp_size": tp,
                            "pp_engine": rng.choice(("afab", "1f1b", "1f1b-2")), "recompute": rng.random() < 0.2})


def chain(seed: int) -> Chain:
    rng = random.Random(seed)
    lora, layers, samples = rng.random() < 0.4, rng.randint(3, 5), 8
    name = rng.choice((*DECODERS, *(() if lora else 5 * (None,))))  # our Llama has no adapters
    sizes = OURS if name is None else TOYS[name][1]
    model = {**sizes, "vocab_size": 1024, "n_layer" if name == "gpt2" else "num_hidden_layers": layers,
             "tie_word_embeddings": name != "mixtral" and rng.random() < 0.5, "initializer_range": 0.1}
    assert name is None or (name in TIED or not model["tie_word_embeddings"])
    num_steps = rng.randint(3, 6)
    ends = [*sorted(rng.sample(range(1, num_steps), rng.choice((0, 1, 1, 1, 2, 2)))), num_steps]
    links, is_stopped = [], [rng.random() < 0.5 for _ in ends[1:]] + [False]
    for end, stopped in zip(ends, is_stopped):  # the loss of Mixtral's router depends on what a micro-batch is
        ranks, flags = layout(rng, layers, samples, (2,) if name == "mixtral" else (1, 2), (1,) if lora else (1, 1, 2))
        who = rng.choice((-1, rng.randrange(ranks))) if stopped else None
        links.append(Link(ranks, flags, end, who, rng.random() < 0.5))
    flags = {"seq_len": rng.choice((9, 16, 24)), "seed": rng.randrange(1000), "max_steps": num_steps,
             "save_every": rng.choice((None, 1, 2)), "warmup_steps": rng.choice((0, 2)),
             "lr_decay": "cosine" if all(is_stopped[:-1]) and rng.random() < 0.7 else "none",
             "max_grad_norm": rng.choice((0, 0.1, 1)), "learning_rate": 3e-3, "validation_split": 0.2,
             "eval_every": rng.choice((0, 1, 2)), "lora_rank": 2 if lora else None,
             "packing": rng.choice(("auto", "off"))}
    size = 2 if name == "mixtral" else samples
    one = words_of({"num_microbatches": samples // size, "batch_size": size})
    return Chain(name, model, rng.random() < 0.5, flags, one, links)
