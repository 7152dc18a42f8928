"""Local steps of train_distributed.py: DiLoCo's algorithm 1, written out here replica by replica, to 1e-11."""

import argparse
import operator
import re

import pytest
import torch
from lab.huggingface import their_name
from lab.launch import fork, metrics, modules_of
from support.checkpoint_runs import SCRIPT, flags_of, newest, tensors_of, write_corpus, write_model
from test_cluster_replan import MADE_UP

with modules_of(9):
    from data.batches import Data
    from dataloader import deal_microbatches
    from model import cross_entropy
    from models.causal import make_llama
    from utils import load_config

STEPS, ROUNDS, RATE, WARMUP = 2, 4, 3e-3, 2
OUTER = ["--outer_learning_rate", 0.7, "--outer_momentum", 0.9]
TOPOLOGIES = {  # name -> ranks, flags, and the micro-batches of a local step of each replica
    "machines": (3, ["--num_microbatches", "3,1,2"], [3, 1, 2]),
    "pipelines": (4, ["--pipelines", "3,1;2,2", "--num_microbatches", "2,1"], [2, 1]),
    "tensor-parallel": (4, ["--tp_size", 2, "--num_microbatches", "2,1"], [2, 1]),
    "two machines": (2, ["--num_microbatches", "2,1"], [2, 1]),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("local")
    write_model(folder / "model", tie_word_embeddings=True)
    write_corpus(folder)
    return folder


def words(folder, name: str, rounds: int = ROUNDS, **changes) -> list:
    return [*flags_of(folder, name, folder / "model", max_steps=rounds * STEPS, save_every=2 * STEPS, lr_decay="none",
                      learning_rate=RATE, warmup_steps=WARMUP * STEPS, local_steps=STEPS, **changes), *OUTER]


def train(folder, name: str, topology: str, *more, rounds: int = ROUNDS) -> str:
    """What it prints."""
    ranks, flags, _ = TOPOLOGIES[topology]
    return fork(9, ranks, *words(folder, name, rounds), *flags, *more, script=SCRIPT).stdout


class Replica:
    """A model that takes local steps."""

    def __init__(self, config):
        self.model = make_llama(config, 42, torch.device("cpu"), torch.float64)
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=RATE, weight_decay=0.01)

    def step(self, micro_batches: list[torch.Tensor], rate: float) -> float:
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        loss = sum(cross_entropy(self.model(ids[None, :-1]), ids[None, 1:]) for ids in micro_batches)
        loss /= len(micro_batches)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()
        return loss.item()


def check(folder, name: str, weights: dict[str, torch.Tensor], losses: list[float]) -> None:
    assert [row["loss"] for row in metrics(folder / "runs", name)] == pytest.approx(losses, abs=1e-11)
    found = tensors_of(newest(folder, name))
    assert max((found[each] - weights[each]).abs().max() for each in weights) <= 1e-11


def written_out(folder, sizes: list[int], *steps: list[int], lost: dict[int, int] = {}) -> tuple[dict, list[float]]:
    """The agreed weights after the last round, and the loss of each. Every second round is saved, so AdamW's averages
    become their means, and its count of steps the largest. `steps`: the local steps of each replica, round by round.
    `lost`: by round, the replica of which nothing counts."""
    steps = steps or [[STEPS] * len(sizes)] * ROUNDS
    rounds, total = len(steps), sum(map(operator.mul, steps[0], sizes))
    config = load_config(str(folder / "model"), num_attention_heads=None)
    args = argparse.Namespace(dataset_name=str(folder / "corpus"), seq_len=16, validation_split=0, packing="auto",
                              seed=42)
    data = Data(args, str(folder / "model"), config.vocab_size, total, rounds).train
    data.set_steps(rounds)
    replicas = [Replica(config) for _ in sizes]
    agreed = [param.detach().clone() for param in replicas[0].params]
    outer, losses = torch.optim.SGD(agreed, lr=0.7, momentum=0.9, nesterov=True), []
    for number in range(rounds):
        for param in agreed:
            param.grad = torch.zeros_like(param)
        losses.append(0.0)
        counts = [*map(operator.mul, steps[number], sizes)]
        left = total - (counts[lost[number]] if number in lost else 0)
        for replica, mine, size in zip(replicas, deal_microbatches(counts), sizes):
            ids, replica.share = [data[number * total + i] for i in mine], len(mine) / total
            weight = 0 if replica is replicas[lost.get(number, -1)] and number in lost else len(mine) / left
            found = [replica.step(ids[k : k + size], RATE * min(1, (number + 1) / (WARMUP + 1)))
                     for k in range(0, len(ids), size)]
            losses[-1] += sum(found) / len(found) * weight
            for mean, param in zip(agreed, replica.params):
                mean.grad += weight * (mean - param.detach())
        outer.step()
        for replica in replicas:
            for mean, param in zip(agreed, replica.params):
                param.data.copy_(mean)
        if number % 2:
            for states in zip(*(map(replica.optimizer.state.get, replica.params) for replica in replicas)):
                for name in ("exp_avg", "exp_avg_sq"):
                    mean = sum(replica.share * state[name] for replica, state in zip(replicas, states))
                    for state in states:
                        state |= {name: mean.clone(), "step": max(each["step"] for each in states).clone()}
    names = [name for name, _ in replicas[0].model.named_parameters()]
    return {their_name(name): mean for name, mean in zip(names, agreed)}, losses


@pytest.mark.parametrize("name", ["machines", "pipelines", "tensor-parallel"])
def test_the_paper_written_out(world_of_one, folder, name):
    train(folder, name, name)
    check(folder, name, *written_out(folder, TOPOLOGIES[name][2]))


def test_a_run_that_goes_on_over_other_machines(world_of_one, folder):
    """Two pipelines, then two tensor-parallel pairs from the third round on; the replicas take what they took."""
    train(folder, "moved", "pipelines", rounds=2)
    assert "going on after step 2" in train(folder, "moved", "tensor-parallel", "--resume", "auto")
    _, losses = written_out(folder, TOPOLOGIES["pipelines"][2])
    assert [row["loss"] for row in metrics(folder / "runs", "moved")] == pytest.approx(losses, abs=1e-11)


def test_an_outer_step_of_one_averages_weights(folder, run_code):
    """With SGD inside, and one local step, it is SGD on the mean over all: the synchronous run."""
    plain = """
import torch
def step(self, closure=None):
    with torch.no_grad():
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad, alpha=0.3)
torch.optim.AdamW.step = step
"""
    for name, more in ("synchronous", []), ("averaged", ["--local_steps", 1]):
        flags = flags_of(folder, name, folder / "model", max_steps=6, warmup_steps=0, max_grad_norm=0, save_every=None)
        run_code("cluster", 3, plain, *flags, "--num_microbatches", "3,1,2", *more, then=SCRIPT.name)
    ours, theirs = ([row["loss"] for row in metrics(folder / "runs", name)] for name in ("averaged", "synchronous"))
    assert ours == pytest.approx(theirs, abs=1e-11) and ours[0] - ours[-1] > 1e-3


def test_rounds_by_speed_with_everything_around_them(folder):
    """Evaluation, adapters, samples of text, int8: they are the one loop's. A faster machine takes more steps."""
    flags = ["--dataset_name", folder / "corpus", "--seq_len", 8, "--device", "cpu", "--dtype", "float64",
             "--batch_size", 1, "--gradient_accumulation", 1, "--epochs", 2, "--max_steps_per_epoch", 6, "--local_steps", 3,
             "--recompute", "--gradient_wire_dtype", "int8",
             "--validation_split", 0.2, "--eval_every", 6, "--sample_every", 12, "--log_dir", folder / "runs",
             "--checkpoint_dir", folder / "checkpoints", "--run_name", "speed"]
    printed = fork(9, 3, *flags, script=SCRIPT).stdout
    steps = re.search(r"local steps of a round: (\d), (\d), (\d)\n", printed)
    assert sum(map(int, steps.groups())) == 9 and "sample after step 4" in printed
    rows = metrics(folder / "runs", "speed")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["trained_tokens"] == 12 * 3 * 8
    assert len(re.findall(r"^evaluation after step [024]:", printed, re.MULTILINE)) == 3
    assert rows[-1]["loss"] < rows[0]["loss"] and newest(folder, "speed").name == "step_00000004"


def test_local_steps_move_to_faster_machines(world_of_one, folder, run_code):
    """They are dealt for machines of which the second is slow; then all are equally fast."""
    measured = "\nfrom run import decide\ndecide.MEASURED.append([1.0, 3.0, 1.5][int(os.environ['RANK'])])"
    printed = run_code("cluster", 3, MADE_UP + measured, *words(folder, "moved steps", 6, gradient_accumulation=1)[1:],
                       then=SCRIPT.name, env={"SPEEDS": "[[0, [1, 1, 1]]]"}).stdout
    assert "local steps of a round: 3, 1, 2\n" in printed and "after step 4 work moves to faster machines" in printed
    check(folder, "moved steps", *written_out(folder, [1, 1, 1], *[[3, 1, 2]] * 4, *[[2, 2, 2]] * 2))


LOSE_A_REPLICA = """
import itertools, os
from ranks.lost import MembershipChanged
from run import decide, local_steps
decide.MEASURED.append([1.0, 3.0, 1.5][int(os.environ["RANK"])])
local_steps.is_elastic = lambda: True
make_round, rounds = local_steps.LocalPlugin.execute_pipeline, itertools.count(1)

def lose(*_):
    raise MembershipChanged("it is lost")

def with_a_loss(self, data_iter, model, *others):
    if next(rounds) != 3:
        return make_round(self, data_iter, model, *others)
    batches = list(itertools.islice(data_iter, self.own_num_microbatches))
    model.exchange = lose
    try:
        make_round(self, iter(batches), model, *others)
    except MembershipChanged:
        del model.exchange
    self.has_begun = False
    if os.environ["RANK"] == "2":
        self.unfinished = None
    return make_round(self, iter(batches), model, *others)

local_steps.LocalPlugin.execute_pipeline = with_a_loss
"""


def test_a_lost_replica_costs_its_part_of_a_round(world_of_one, folder, run_code):
    """The exchange of the third round fails; then the first two ranks have what they made of it, and the third not."""
    printed = run_code("cluster", 3, LOSE_A_REPLICA, *words(folder, "lost", gradient_accumulation=1)[1:], "--replan",
                       "off", then=SCRIPT.name).stdout
    assert "local steps of a round: 3, 1, 2\n" in printed
    check(folder, "lost", *written_out(folder, [1, 1, 1], *[[3, 1, 2]] * 4, lost={2: 2}))
