"""Runs that chance has drawn compute, in float64, what one process computes that is never stopped.

    pytest tests/test_random_runs.py                                a few of each kind, other ones each time
    FUZZ=200 pytest tests/test_random_runs.py --all-cases           200 chains and ten times as many topologies
    FUZZ=200 pytest tests/test_random_runs.py -k "chain and 17"     one of them again

A topology: train.py of a step, with any sizes, flags and shape of the model, on ranks in one process
(lab/thread_ranks.py), a tenth of a second each. A chain: up to three runs of train_distributed.py with unlike
topologies. Each ends by Ctrl-C or at its --max_steps, and the next one goes on. What fails prints what was drawn; its
folder stays there.
"""

import json
import os
import random
import shutil

import pytest
import torch
from lab.launch import fork_server, start_fork
from lab.ranks import threads
from maintain.processes import eventually, left_behind
from support import random_runs
from support.checkpoint_runs import EXACT, SCRIPT, checkpoint, flags_of, write_answers, write_corpus, write_model
from support.recordings import assert_same_math, record

SEEDS = max(12, int(os.environ.get("FUZZ", 0)))


def check_chain(folder, model, flags, alone, links) -> list:
    flags["dataset_name"] = folder.parent / flags["dataset_name"]
    modules = ["peft"] * bool(flags["lora_rank"])
    modules += [f"transformers.models.{kind}.modeling_{kind}" for kind in [model["kind"]] if kind]

    def run(name: str, ranks: int, changes: dict, *more, env=None):
        words = flags_of(folder, name, folder / "model", **flags | changes)
        return start_fork(9, ranks, folder / f"out_{name}", SCRIPT, *words, *more, env=env, modules=modules, check=False,
                          script=EXACT)

    one, done, start, resume = run("one", 1, alone), [], 0, []
    for ranks, changes, end, stopped in links:
        env = {} if stopped is None else {"STOP": f"{stopped}:{end - start}:2"}
        done.append(run("many", ranks, changes, *resume, env=env).result())
        assert done[-1].returncode == (130 if env else 0), done[-1].stderr
        assert (f"stopped after step {end}, as it was told" in done[-1].stdout) == bool(env), done[-1].stdout
        start, resume = end, ["--resume", "auto" if end % 2 else checkpoint(folder, "many", end)]
    done.append(one.result())
    assert done[-1].returncode == 0, done[-1].stderr
    every, ends = flags["eval_every"] or flags["max_steps"], {end for *_, end, stopped in links if stopped is None}
    for file, names in {"metrics": ("loss", "grad_norm", "learning_rate"), "evaluation": ("evaluation_loss",)}.items():
        one, many = ({row["step"]: row for row in map(json.loads, open(folder / "runs" / name / f"{file}.jsonl"))}
                     for name in ("one", "many"))
        assert [*many] == [step for step in one if file == "metrics" or step % every == 0 or step in ends]
        for step, name in ((step, name) for step in many for name in names):
            assert many[step][name] == pytest.approx(one[step][name], rel=0, abs=1e-9), f"{name} of step {step}"
    return done


@pytest.mark.drawn(6)
@pytest.mark.parametrize("seed", range(10 * SEEDS))
def test_a_topology_on_ranks_in_one_process(seed, tmp_path):
    """Messages all arrive, and none changes while it is sent."""
    model, step, ranks, flags, alone = random_runs.topology(seed)
    write_model(tmp_path / "model", **model)
    here = ["--model_name", tmp_path / "model", "--num_hidden_layers", model["num_hidden_layers"]]
    one = record(step if step > 15 else 3, [*alone, *here], threads(1))
    assert_same_math(one, record(step, [*flags, *here], threads(ranks)), len(one.rows))


MISTAKES = {  # flags that follow the others -> what the message names
    ("--ep_size", 99): "--ep_size 99", ("--shard_size", 99, "--zero", 3): "--zero 3", ("--pp_size", 99): "pp_size=99",
    ("--experts_per_token", 99): "--experts_per_token 99", ("--zero_shares", "1,1,9", "--zero", 0): "--zero",
    ("--gather_once", "--zero", 0): "--zero", ("--sequence_parallel", "--tp_size", 1): "--tp_size 1"}


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_compositions_of_the_last_step(count, tmp_path):
    """Experts with any axes: what is legal computes the same, and a mistake in it is one line that names the values."""
    exact, refused, chance = 0, 0, random.Random(os.environ["DRAW"])
    for seed in chance.sample(range(10_000), count):
        seed = seed * len(random_runs.STEPS) + [*random_runs.STEPS].index(16)
        (model, step, ranks, flags, alone), folder = random_runs.topology(seed), tmp_path / str(seed)
        write_model(folder, **model)
        here = ["--model_name", folder, "--num_hidden_layers", model["num_hidden_layers"]]
        mistake, said = chance.choice([*MISTAKES.items()])
        with pytest.raises(ValueError) as error:
            record(step, [*flags, *here, *mistake], threads(ranks))
        assert said in str(error.value) and "\n" not in str(error.value), (seed, mistake, error.value)
        one = record(step, [*alone, *here], threads(1))
        assert_same_math(one, record(step, [*flags, *here], threads(ranks)), len(one.rows))
        exact, refused = exact + 1, refused + 1
    print(f"{exact} exact, {refused} refused")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the texts and the answers of the chains."""
    folder = tmp_path_factory.mktemp("random")
    write_corpus(folder)
    write_answers(folder, 30)
    return folder


@pytest.mark.drawn(2)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_chain_of_runs(data, seed):
    """It is equal to one run, prints no traceback, and leaves no process."""
    drawn, folder = random_runs.chain(seed), data / f"chain{seed}"
    print(f"\nchain {seed} in {folder}: {drawn}")
    torch.manual_seed(seed)  # for weights to add adapters to
    write_model(folder / "model", **drawn[0])
    for done in check_chain(folder, *drawn):
        assert "Traceback" not in done.stdout + done.stderr, done
    assert eventually(lambda: not left_behind(fork_server().process.pid), 20), "a process is left"
    shutil.rmtree(folder)
