"""Runs that chance has drawn compute, in float64, what one process computes that is never stopped.

    pytest tests/test_random_runs.py                                a few of each kind, other ones each time
    FUZZ=200 pytest tests/test_random_runs.py --all-cases -s        200 of each, and how they ended
    FUZZ=200 pytest tests/test_random_runs.py -k "chain-17-"        one of them again

A topology: train.py of a step, with any sizes, flags and shape of the model; most of them on ranks in one process
(tools/thread_ranks.py), a tenth of a second each. A chain: up to three runs of train_distributed.py with unlike topologies.
Each ends by Ctrl-C or at its --max_steps, and the next one goes on. What fails prints what was drawn; its folder stays
there.
"""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest
import random_runs
import torch
from checkpoint_runs import ROOT, SCRIPT, checkpoint, flags_of, write_corpus, write_model
from launch import fork_server, metrics, start_fork
from processes import eventually, left_behind
from recordings import assert_same_math, read_run, record, train_flags_here

SEEDS = max(12, int(os.environ.get("FUZZ", 0)))


def check_topology(folder, _, step, ranks, flags, alone) -> list:
    where = ["--model_name", folder / "model", "--dataset_name", folder.parent / "corpus", "--log_dir", folder,
             "--run_name"]
    jobs = [record(folder / "one", 16 if "--num_experts" in alone else 3, 1, [*alone, *where, "one"]),
            record(folder / "many", step, ranks, [*flags, *where, "many"])]
    done = [job.result() for job in jobs]
    assert_same_math(read_run(folder / "one"), read_run(folder / "many"), len(metrics(folder, "one")))
    return done


def check_chain(folder, model, flags, alone, links) -> list:
    flags["dataset_name"] = folder.parent / flags["dataset_name"]
    modules = ["peft"] * bool(flags["lora_rank"])
    modules += [f"transformers.models.{kind}.modeling_{kind}" for kind in [model["kind"]] if kind]

    def run(name: str, ranks: int, changes: dict, *more, env=None):
        words = flags_of(folder, name, folder / "model", **flags | changes)
        return start_fork(9, ranks, folder / f"out_{name}", SCRIPT, *words, *more, env=env, modules=modules,
                          script=ROOT / "tests" / "support" / "checkpoint_runs.py")

    one, done, start, resume = run("one", 1, alone), [], 0, []
    for ranks, changes, end, stopped in links:
        env = {} if stopped is None else {"STOP": f"{stopped}:{end - start}:2"}
        done.append(run("many", ranks, changes, *resume, env=env).result())
        assert (f"stopped after step {end}, as it was told" in done[-1].stdout) == bool(env), done[-1].stdout
        start, resume = end, ["--resume", "auto" if end % 2 else checkpoint(folder, "many", end)]
    done.append(one.result())
    every, ends = flags["eval_every"] or flags["max_steps"], {end for *_, end, stopped in links if stopped is None}
    for file, names in {"metrics": ("loss", "grad_norm", "learning_rate"), "evaluation": ("evaluation_loss",)}.items():
        one, many = ({row["step"]: row for row in map(json.loads, open(folder / "runs" / name / f"{file}.jsonl"))}
                     for name in ("one", "many"))
        assert [*many] == [step for step in one if file == "metrics" or step % every == 0 or step in ends]
        for step, name in ((step, name) for step in many for name in names):
            assert many[step][name] == pytest.approx(one[step][name], rel=0, abs=1e-9), f"{name} of step {step}"
    return done


@pytest.mark.drawn(8)
@pytest.mark.parametrize("seed", range(10 * SEEDS))
def test_a_topology_on_ranks_in_one_process(seed, tmp_path):
    """Messages all arrive, and none changes while it is sent."""
    model, step, ranks, flags, alone = random_runs.topology(seed)
    write_model(tmp_path / "model", **model)
    here = ["--model_name", tmp_path / "model", "--num_hidden_layers", model["num_hidden_layers"], "--num_workers", 0]
    one = train_flags_here(16 if "--num_experts" in alone else 3, 1, [*alone, *here])
    assert_same_math(one, train_flags_here(step, ranks, [*flags, *here]), len(one.rows))


@pytest.fixture(scope="module")
def jobs(selected, tmp_path_factory):
    """case -> its folder, what was drawn, and the future of what its runs printed."""
    root, check = tmp_path_factory.mktemp("random"), {"topology": check_topology, "chain": check_chain}
    write_corpus(root)
    rows = [{"prompt": "So? " * (1 + i % 3), "completion": "word " * (1 + i * i % 16) + "."} for i in range(30)]
    (root / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ThreadPoolExecutor(4) as pool:
        jobs = {}
        for kind, seed in selected("case"):
            folder, drawn = root / f"{kind}{seed}", getattr(random_runs, kind)(seed)
            torch.manual_seed(seed)  # for weights to add adapters to
            write_model(folder / "model", **drawn[0])
            jobs[kind, seed] = folder, drawn, pool.submit(check[kind], folder, *drawn)
        yield jobs


@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", [pytest.param((kind, seed), id=f"{kind}-{seed}-") for seed in range(SEEDS)
                                  for kind in ("topology", "chain")])
def test_a_run_that_chance_has_drawn(jobs, ended, case):
    """It is equal, prints no traceback, and leaves no process."""
    folder, drawn, job = jobs[case]
    print(f"\n{case} in {folder}: {drawn}")
    ended[case[0]]["fault"] += 1
    for done in job.result():
        assert "Traceback" not in done.stdout + done.stderr, done
    assert eventually(lambda: not left_behind(fork_server().process.pid), 20), "a process is left"
    ended[case[0]].update(equal=1, fault=-1)
    shutil.rmtree(folder)
