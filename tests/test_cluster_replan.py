"""A plan that follows: when work moves, that it does not flap, and that a run with moves is one without, in float64."""

import json
import os
import random
import socket
import time

import pytest
import torch
from bed import NODES, bed, on_disk, testbed  # noqa: F401
from checkpoint_runs import newest, write_corpus, write_model
from elastic_bed import Training, kill_all, switch_on
from launch import ROOT, fork, losses, metrics, modules_of

with modules_of(9):
    from planning.follow import CALM, Follower, Split, changed

SEED, KILLS = int(os.environ.get("FAULT_SEED", 1)), int(os.environ.get("KILLS", 3))
# Ranks compute for as long as SPEEDS says, [[first step, seconds of each rank for a layer of a sample], ...].
MADE_UP = """
import json, os
from training import replan
follow, SPEEDS = replan.Replanner.follow, json.loads(os.environ["SPEEDS"])

def with_made_up_speeds(self, run, plugin, step):
    speeds = [each for first, each in SPEEDS if step >= first][-1]
    layers, samples = self.follower.split
    works = [count * work for own, count in zip(layers, samples) for work in self.follower.work(own)
             for _ in range(self.layout.tp_size)]
    run.watch.told = [1e-3, *(speed * work for speed, work in zip(speeds, works))]
    follow(self, run, plugin, step)

replan.Replanner.follow = with_made_up_speeds
"""


def steps_of(follower: Follower, speeds, steps, first: int = 1, noise=None) -> list[tuple[int, Split]]:
    """The moves in so many steps. `speeds`: seconds of each stage for a layer of a sample, by pipeline."""
    moves = []
    for step in range(first, first + steps):
        of_stages = [[rate * work * count * (noise.lognormvariate(0, 0.25) if noise else 1)
                      for rate, work in zip(rates, follower.work(layers))]
                     for rates, layers, count in zip(speeds, *follower.split)]
        follower.observe(1.02 * max(map(max, of_stages)), of_stages)
        if split := follower.decide(step):
            moves.append((step, split))
    return moves


def shares(samples, **options) -> Follower:
    return Follower(Split([[4]] * len(samples), samples), 4, 1.0, **options)


def stages(layers, seconds: float = 1.0, limits: int = 99) -> Follower:
    return Follower(Split([layers], [32]), 1, 0.0, False, lambda: [[limits] * len(layers)], lambda count: seconds)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_throttled_host_is_noticed_within_ten_steps(count):
    """At half the speed; afterwards a step takes at most 1 / 0.95 of what it takes with a plan that knows the speeds."""
    follower, rates = shares([32] * count), [[1.0]] * count
    assert steps_of(follower, rates, 40) == []
    slow = [[2.0], *rates[1:]]
    [(step, split)] = steps_of(follower, slow, 40, 41)
    ideal = 32 * count / sum(1 / each for [each] in slow) * 5  # layers, with the head
    assert step - 40 <= 10 and sum(split.samples) == 32 * count
    assert follower.seconds(split, slow) <= ideal / 0.95
    [(step, split)] = steps_of(follower, rates, 40, 81 + CALM)
    assert step - 80 - CALM <= 20 and split.samples == [32] * count, "it is as fast as before"


def test_a_small_gain_takes_twenty_steps():
    """Two stages of 10 layers, and the second one takes 1.23 times as long: 11 and 9 layers are 11 % faster."""
    follower = stages([10, 10])
    assert steps_of(follower, [[1.0, 1.0]], 30) == []
    [(step, split)] = steps_of(follower, [[1.0, 1.23]], 60, 31)
    assert split.layers == [[11, 9]] and 48 <= step <= 52, step
    assert steps_of(stages([10, 10]), [[1.0, 1.15]], 99) == [], "less than 10 %"


@pytest.mark.parametrize("seed", range(20))
def test_noise_moves_nothing(seed):
    """Seconds that vary by 25 %: samples may be corrected once, early; layers stay."""
    noise, rates = random.Random(seed), [[1.0], [0.5], [0.7]]
    follower = shares([16, 32, 23])
    assert all(step <= 4 for step, _ in steps_of(follower, rates, 400, noise=noise))
    follower = stages([4, 5, 3])
    assert steps_of(follower, [[1.0, 0.8, 1.3]], 400, noise=noise) == []


def test_a_machine_that_is_fast_and_slow_by_turns():
    """For twenty steps each: every move doubles what the next one needs, so there are three in 100 steps at most."""
    follower, moves = shares([32, 32]), []
    for turn in range(30):
        moves += steps_of(follower, [[1.0], [1.0 + 8 * (turn % 2)]], 20, 1 + 20 * turn)
    at = [step for step, _ in moves]
    assert 3 <= len(at) and all(sum(first <= step < first + CALM for step in at) <= 3 for first in at), at


def test_a_pause_is_no_slow_machine():
    """One step, or two, in which a host does something else for as long as ten steps take."""
    follower = shares([32, 32])
    assert steps_of(follower, [[1.0], [1.0]], 20) == []
    assert steps_of(follower, [[1.0], [10.0]], 2, 21) == [] == steps_of(follower, [[1.0], [1.0]], 40, 23)


def test_the_early_correction():
    """After the second to fourth step, once, where it gains 3 %; the first step warms up and says nothing."""
    follower = shares([32, 32])
    follower.observe(99.0, [[99.0], [1.0]])
    [(step, split)] = steps_of(follower, [[1.0], [0.9]], 20, 2)
    assert (step, split.samples) == (4, [30, 34]) and follower.moved == []
    assert steps_of(shares([32, 32]), [[1.0], [0.95]], 99) == [], "less than 3 %"
    assert steps_of(shares([32, 32], moves_samples=False), [[1.0], [0.1]], 99) == []


def test_layers_move_where_it_pays_and_fits():
    slow, fast = [[1.0, 1.0, 2.0]], [[1.0, 1.0, 1.0]]
    saved = 100 * 32 * (8 - 5)  # 4,4,4 takes 8 of these seconds a sample, 5,4,3 or 5,5,2 less
    follower = stages([4, 4, 4], seconds=saved / 2)
    [(_, split)] = steps_of(follower, slow, 60)
    assert split.layers == [[5, 5, 2]]
    assert steps_of(stages([4, 4, 4], seconds=2 * saved), slow, 60) == []
    assert steps_of(stages([4, 4, 4], limits=4), slow, 60) == [] == steps_of(stages([4, 4, 4]), fast, 60)


def test_what_a_gpu_has_not_measured():
    follower = shares([32, 32])
    for step in range(1, 100):
        follower.observe(1.0, [[0.0 if step % 10 else 9.0], [1.0]])
        follower.decide(step)
    assert follower.split.samples[0] < 10 and len(follower.seen) < 10


def test_layers_that_change_their_stage():
    assert changed(Split([[4, 4], [8]], [1, 1]), Split([[6, 2], [8]], [1, 1])) == 2
    assert changed(Split([[2, 2, 2]], [1]), Split([[3, 2, 1]], [1])) == 2


def run(folder, ranks: int, name: str, *flags, program=None, **variables):
    words = ["--model_name", folder / "model", "--dataset_name", folder / "corpus", "--seq_len", 16, "--dtype",
             "float64", "--device", "cpu", "--batch_size", 2, "--max_steps", 40, "--save_every", 11, "--log_dir",
             folder / "runs", "--checkpoint_dir", folder / "checkpoints", "--run_name", name, *flags]
    if "--plan" in flags:
        words[words.index("--plan") + 1] = folder / "plan.json"
        del words[(place := words.index("--batch_size")):place + 2]
    if program is None:
        return fork(9, ranks, *words, script=ROOT / "cluster" / "train_distributed.py", modules=["peft"]).stdout
    return program("cluster", ranks, MADE_UP, *words, then="train_distributed.py", modules=["peft"],
                   env={name: str(value) for name, value in variables.items()}).stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("replan")
    write_corpus(folder)
    write_model(folder / "model", "llama", "float32", vocab_size=1024, hidden_size=32, intermediate_size=48,
                num_hidden_layers=4, num_attention_heads=4)
    plan = {"hosts": [socket.gethostname()] * 3, "pipelines": [{"machines": [2, 0], "layers": [2, 2], "samples": 8}],
            "micro_batch_size": 2, "schedule": "1f1b-2", "seq_len": 16, "dtype": "float64", "model": {}}
    (folder / "plan.json").write_text(json.dumps(plan))
    return folder


def weights(folder, name: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    path = newest(folder, name)
    return {key: value for file in path.glob("*-of-*.safetensors") for key, value in load_file(file).items()}


CASES = {  # ranks, flags, speeds, the moves that have to be in the output
    "samples": (2, ["--gradient_accumulation", 2], [[0, [1, 1]], [12, [1, 3]], [25, [9, 3]]],
                ["samples 4,4 -> 6,2", "samples 6,2 -> 2,6"]),
    "layers": (2, ["--pipelines", "2,2", "--gradient_accumulation", 4, "--replan", "auto"],
               [[0, [1, 1]], [12, [1, 3]], [25, [9, 2]]], ["layers 2,2 -> 3,1", "layers 3,1 -> 1,3"]),
    "both": (3, ["--pipelines", "1,3;4", "--gradient_accumulation", 4, "--replan", "auto"],
             [[0, [1, 1, 1]], [12, [1, 3, 1]]], ["layers 1,3;4 -> 3,1;4, samples 8,8 -> 5,11"]),
    "samples of tp ranks": (4, ["--tp_size", 2, "--gradient_accumulation", 2, "--validation_split", 0.3, "--eval_every", 5],
                            [[0, [1, 1, 1, 1]], [12, [1, 1, 3, 1]]], ["samples 4,4 -> 6,2"]),
    "a plan": (3, ["--plan", "plan.json"], [[0, [1, 1]], [12, [1, 3]], [25, [9, 2]]],
               ["layers 2,2 -> 3,1", "layers 3,1 -> 1,3", "idle: "]),
    "adapters": (2, ["--pipelines", "2,2", "--gradient_accumulation", 4, "--replan", "auto", "--lora_rank", 2,
                     "--validation_split", 0.3, "--eval_every", 5], [[0, [1, 1]], [12, [1, 3]]],
                 ["layers 2,2 -> 3,1"]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_moved_equals_one_that_did_not(folder, run_code, case):
    """Losses and weights of 40 steps, to 1e-11: no sample is read twice or never, and no moment is lost."""
    ranks, flags, speeds, moves = CASES[case]
    equal = [] if "--replan" in flags or case == "a plan" else ["--equal_shares"]
    text = run(folder, ranks, f"{case}-moved", *flags, program=run_code, SPEEDS=speeds)
    run(folder, ranks, f"{case}-still", *flags, *equal, "--replan", "off")  # the last one counts
    print("\n".join(line for line in text.splitlines() if "work moves" in line or "going on" in line))
    assert all(move in text for move in moves), text
    moved, still = losses(folder / "runs", f"{case}-moved"), losses(folder / "runs", f"{case}-still")
    assert len(moved) == 40 and moved == pytest.approx(still, rel=0, abs=1e-11)
    a, b = (weights(folder, f"{case}-{kind}") for kind in ("moved", "still"))
    assert a.keys() == b.keys() and max((a[name] - b[name]).abs().max() for name in a) <= 1e-11


@pytest.mark.hosts
@pytest.mark.slow
def test_hosts_are_lost_while_layers_move(bed, tmp_path):
    """Elastic, layers move every sixth step, and hosts are killed at random moments: the losses stay exact."""
    chance, script = random.Random(SEED), ROOT / "tests" / "support" / "replan_always.py"
    write_corpus(tmp_path / "in")
    testbed("own", tmp_path / "in")
    flags = ["--dataset_name", tmp_path / "in" / "corpus", "--seq_len", 16, "--dtype", "float64", "--batch_size", 1,
             "--num_hidden_layers", 4, "--learning_rate", 1e-5, "--device", "cpu", "--max_steps", 3000]
    run = Training(tmp_path, script, *flags, "--save_every", 10, "--run_name", "moving", "--log_dir", "runs",
                   "--resume", "auto", "--pipelines", "4;2,2|4;4|4", "--gradient_accumulation", 2, "--replan", "auto")
    try:
        for _ in range(KILLS):
            run.wait(lambda mark=run.mark(): "".join(run.run.lines[mark:]).count("work moves") >= 2)
            time.sleep(chance.uniform(0, 0.35))
            node, last = chance.choice(NODES), run.steps()[-1]
            line = run.run.lines[-1]
            mark = run.mark()
            kill_all(node)
            after = run.went_on(2, mark, 90)
            print(f"{node} killed after step {last} and {line!r}: on two hosts after step {after}", flush=True)
            mark = run.mark()
            switch_on(node)
            run.went_on(3, mark, 90)
        run.stop()
    finally:
        for node in NODES:
            switch_on(node)
    found = max((metrics(on_disk(node, ROOT / "runs"), "moving") for node in NODES), key=len)
    fork(9, 1, *flags[:-1], len(found), "--gradient_accumulation", 4, "--run_name", "one", "--log_dir", tmp_path,
         "--checkpoint_dir", tmp_path / "checkpoints", script=ROOT / "cluster" / "train_distributed.py")
    expected = metrics(tmp_path, "one")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    assert max(abs(a["loss"] - b["loss"]) for a, b in zip(found, expected)) <= 1e-9
