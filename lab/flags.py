"""Flags of train.py: what they say of the ranks, and those of one process that computes the same."""

import argparse

AXES = {"dp_size": 1, "pp_size": 1, "tp_size": 1, "cp_size": 1, "ep_size": 1, "zero": 0}


def sizes(flags: tuple[str, ...] | list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, default in AXES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=8)
    parser.add_argument("--num_experts", type=int, default=0)
    parser.add_argument("--pp_engine", default="1f1b")
    parser.add_argument("--sequence_parallel", action="store_true")
    return parser.parse_known_args(list(flags))[0]


def without(flags: tuple[str, ...], names: tuple[str, ...], switches: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The flags but for these, of which `switches` have no value."""
    kept, words = [], iter(flags)
    for word in words:
        if word in names:
            next(words)
        elif word not in switches:
            kept.append(word)
    return tuple(kept)


def one_process(flags: tuple[str, ...]) -> tuple[str, ...]:
    """Flags of one process that computes the same: it does the micro-batches of all replicas."""
    found = sizes(flags)
    names = (*(f"--{axis}" for axis in AXES), "--zero_shares", "--gradient_accumulation_steps", "--virtual_stages",
             "--pp_engine")
    return (*without(flags, names, ("--sequence_parallel",)), "--dp_size", "1", "--pp_size", "1", "--tp_size", "1",
            "--gradient_accumulation_steps", str(found.dp_size * found.gradient_accumulation_steps))
