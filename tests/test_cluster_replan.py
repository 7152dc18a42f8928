"""A plan that follows: when work moves, that it does not flap, and that a run with moves is one without, in float64."""

import json
import random
import socket

import pytest
from lab.launch import ROOT, fork, losses, modules_of
from support.checkpoint_runs import newest, write_corpus, write_model

with modules_of(9):
    from planning.rebalancing import CALM, Rebalancing

# Ranks compute for as long as SPEEDS says, [[first step, seconds of each rank for a sample], ...].
MADE_UP = """
import json, os
import process_group_manager as pgm
from run import samples
rebalance, SPEEDS = samples.SamplesPlugin.rebalance, json.loads(os.environ["SPEEDS"])

def with_made_up_speeds(self, args, step, agreement):
    speeds = [each for first, each in SPEEDS if step >= first][-1]
    counts = [count for count, block in zip(self.samples, pgm.process_group_manager.ranks)
              for _ in block.flatten()]
    agreement.longest_step, agreement.of_ranks = 1e-3, [[speed * count] for speed, count in zip(speeds, counts)]
    rebalance(self, args, step, agreement)
    assert self.rebalancing is None or self.samples == self.rebalancing.samples == args.samples

samples.SamplesPlugin.rebalance = with_made_up_speeds
"""


def steps_of(rebalancing: Rebalancing, speeds, steps, first: int = 1, noise=None) -> list[tuple[int, list[int]]]:
    """The moves in so many steps. `speeds`: seconds of each stage for a sample, by pipeline."""
    moves = []
    for step in range(first, first + steps):
        of_stages = [[rate * count * (noise.lognormvariate(0, 0.25) if noise else 1) for rate in rates]
                     for rates, count in zip(speeds, rebalancing.samples)]
        if samples := rebalancing.follow(step, 1.02 * max(map(max, of_stages)), of_stages):
            moves.append((step, samples))
    return moves


def test_rounds_are_corrected_after_the_first_one():
    """As a first step, it would not count; a gain of less than 3 % moves nothing, then or later."""
    assert steps_of(Rebalancing([30, 10, 20], 1, 10, early=1), [[1], [1], [1]], 3) == [(1, [20, 20, 20])]
    assert steps_of(Rebalancing([30, 10, 20], 1, 10), [[1], [1], [1]], 3) == []
    assert steps_of(Rebalancing([500, 500], 1, early=1), [[1.02], [1]], 3) == []


@pytest.mark.parametrize("count", [2, 5])
def test_a_throttled_host_is_noticed_within_ten_steps(count):
    """At half the speed; afterwards a step takes at most 1 / 0.95 of what it takes with a plan that knows the speeds."""
    rebalancing, rates = Rebalancing([32] * count, 4), [[1.0]] * count
    assert steps_of(rebalancing, rates, 40) == []
    slow = [[2.0], *rates[1:]]
    [(step, samples)] = steps_of(rebalancing, slow, 40, 41)
    ideal = 32 * count / sum(1 / each for [each] in slow)
    assert step - 40 <= 10 and sum(samples) == 32 * count
    assert rebalancing.seconds(samples, slow) <= ideal / 0.95
    [(step, samples)] = steps_of(rebalancing, rates, 40, 81 + CALM)
    assert step - 80 - CALM <= 20 and samples == [32] * count, "it is as fast as before"


def test_a_small_gain_takes_twenty_steps():
    """Two pipelines of 10 samples, and the second one takes 1.23 times as long: 11 and 9 are 11 % faster."""
    rebalancing = Rebalancing([10, 10], 1)
    assert steps_of(rebalancing, [[1.0], [1.0]], 30) == []
    [(step, samples)] = steps_of(rebalancing, [[1.0], [1.23]], 60, 31)
    assert samples == [11, 9] and 48 <= step <= 52, step


@pytest.mark.parametrize("seed", range(5))
def test_noise_moves_nothing(seed):
    """Seconds that vary by 25 %: samples may be corrected once, early."""
    noise, rates = random.Random(seed), [[1.0], [0.5], [0.7]]
    rebalancing = Rebalancing([16, 32, 23], 4)
    assert all(step <= 4 for step, _ in steps_of(rebalancing, rates, 400, noise=noise))


def test_a_machine_that_is_fast_and_slow_by_turns():
    """For twenty steps each: every move doubles what the next one needs, so there are three in 100 steps at most."""
    rebalancing, moves = Rebalancing([32, 32], 4), []
    for turn in range(30):
        moves += steps_of(rebalancing, [[1.0], [1.0 + 8 * (turn % 2)]], 20, 1 + 20 * turn)
    at = [step for step, _ in moves]
    assert 3 <= len(at) and all(sum(first <= step < first + CALM for step in at) <= 3 for first in at), at


def test_a_pause_is_no_slow_machine():
    """One step, or two, in which a host does something else for as long as ten steps take."""
    rebalancing = Rebalancing([32, 32], 4)
    assert steps_of(rebalancing, [[1.0], [1.0]], 20) == []
    assert steps_of(rebalancing, [[1.0], [10.0]], 2, 21) == [] == steps_of(rebalancing, [[1.0], [1.0]], 40, 23)


def test_the_early_correction():
    """After the second to fourth step, once, where it gains 3 %; the first step warms up and says nothing."""
    rebalancing = Rebalancing([32, 32], 4)
    assert rebalancing.follow(1, 99.0, [[99.0], [1.0]]) is None
    assert steps_of(rebalancing, [[1.0], [0.9]], 20, 2) == [(4, [30, 34])]
    assert steps_of(Rebalancing([32, 32], 4), [[1.0], [0.95]], 99) == [], "less than 3 %"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replan")
    write_corpus(folder)
    write_model(folder / "model", "llama", "float32", vocab_size=1024, hidden_size=32, intermediate_size=48,
                num_hidden_layers=4, num_attention_heads=4)
    plan = {"hosts": [socket.gethostname()] * 4, "pipelines": [{"machines": [3, 1], "layers": [1, 3], "samples": 4},
                                                               {"machines": [0], "layers": [4], "samples": 4}],
            "micro_batch_size": 2, "schedule": "1f1b-2", "seq_len": 16, "dtype": "float64", "model": {}}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


CASES = {  # ranks, flags, speeds, what has to be in the output
    "a plan": (4, [], [[0, [1, 1, 1]], [8, [1, 1, 3]]], ["samples 3,5 -> 6,2", "idle: "]),
    "samples of stages": (3, ["--pipelines", "1,3;4", "--num_microbatches", "4,4", "--replan", "auto"],
                          [[0, [1, 1, 2]], [8, [1, 3, 1]], [16, [9, 3, 1]]], ["samples 8,8 -> "]),
    "samples of tp ranks": (4, ["--tp_size", 2, "--gradient_accumulation", 2, "--validation_split", 0.3, "--eval_every",
                                5], [[0, [1, 1, 1, 1]], [8, [1, 1, 3, 1]]], ["samples 4,4 -> 6,2"]),
    "adapters": (2, ["--gradient_accumulation", 2, "--lora_rank", 2], [[0, [1, 1]], [8, [1, 3]]],
                 ["samples 4,4 -> 6,2"]),
}
STEPS = 24


@pytest.mark.parametrize("case", [
    pytest.param(case, marks=() if case == "a plan" else pytest.mark.slow(drawn=1)) for case in CASES])
def test_a_run_that_moved_equals_one_that_did_not(folder, run_code, case):
    """Losses and weights, to 1e-11: no sample is read twice or never, and no moment is lost."""
    from safetensors.torch import load_file

    ranks, flags, speeds, said = CASES[case]
    flags = flags or ["--plan", folder / "plan.json"]
    size = [] if case == "a plan" else ["--batch_size", 2]
    equal = [] if "--replan" in flags or case == "a plan" else ["--equal_shares"]
    words = ["--model_name", folder / "model", "--dataset_name", folder / "corpus", "--seq_len", 16, "--dtype",
             "float64", "--device", "cpu", *size, "--max_steps", STEPS, "--save_every", 11, "--log_dir",
             folder / "runs", "--checkpoint_dir", folder / "checkpoints", *flags, "--run_name"]
    text = run_code("cluster", ranks, MADE_UP, *words, f"{case}-moved", then="train_distributed.py", modules=["peft"],
                    env={"SPEEDS": str(speeds)}).stdout
    assert all(each in text for each in said), text
    fork(9, ranks, *words, f"{case}-still", *equal, "--replan", "off", modules=["peft"],  # the last --replan counts
         script=ROOT / "cluster" / "train_distributed.py")
    moved, still = losses(folder / "runs", f"{case}-moved"), losses(folder / "runs", f"{case}-still")
    assert len(moved) == STEPS and moved == pytest.approx(still, rel=0, abs=1e-11)
    a, b = ({key: value for file in newest(folder, f"{case}-{kind}").glob("*-of-*.safetensors")
             for key, value in load_file(file).items()} for kind in ("moved", "still"))
    assert a.keys() == b.keys() and max((a[name] - b[name]).abs().max() for name in a) <= 1e-11
