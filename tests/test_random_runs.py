"""Runs that chance has drawn compute, in float64, what one process computes that is never stopped.

    pytest tests/test_random_runs.py                                a few of each kind
    FUZZ=200 pytest tests/test_random_runs.py -m "" -s              200 of each, and how they ended
    FUZZ=200 pytest tests/test_random_runs.py -m "" -k "chain-17-"  one of them again

A topology: train.py of a step, with any sizes, flags and shape of the model. A chain: up to three runs of
train_distributed.py with unlike topologies. Each ends by Ctrl-C or at its --max_steps, and the next one goes on. What
fails prints what was drawn; its folder stays there.
"""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import random_runs
import torch
from checkpoint_runs import ROOT, SCRIPT, checkpoint, flags_of, write_corpus, write_model
from launch import fork, fork_server, metrics, start_fork
from processes import eventually, left_behind
from recordings import assert_same_math, record

QUICK = {"topology": 5, "chain": 3}  # kind of a case -> how many every run has
SEEDS = max(20, int(os.environ.get("FUZZ", 0)))  # the other ones of 20 are for `slow`
CASES = [pytest.param((kind, seed), marks=pytest.mark.slow if seed >= quick else (), id=f"{kind}-{seed}-")
         for kind, quick in QUICK.items() for seed in range(SEEDS)]
GENERATOR = threading.Lock()  # of torch, which all threads share


def check_topology(folder, step, ranks, flags, alone, shape, error) -> str:
    write_model(folder / "model", **shape)
    where = ["--model_name", folder / "model", "--dataset_name", folder.parent / "corpus", "--log_dir", folder]
    if error:
        done = fork(step, ranks, *flags, *where, check=False)
        assert done.returncode == 2 and done.stderr.count("error: ") == 1 and error in done.stderr, done
        return quiet(done, f"step {step} refuses")
    jobs = [record(folder / "one", 3, 1, [*alone, *where, "--run_name", "one"]),
            record(folder / "many", step, ranks, [*flags, *where, "--run_name", "many"])]
    for job in jobs:
        quiet(job.result())
    assert_same_math(folder / "one", folder / "many", len(metrics(folder, "one")))
    return f"step {step} equal"


def check_chain(folder, family, shape, flags, alone, links) -> str:
    kind, lora = family and family.replace("-", "_"), flags["lora_rank"]
    with GENERATOR:
        torch.manual_seed(0)
        write_model(folder / "model", kind, "float64" if lora else None, **shape)
    flags["dataset_name"] = folder.parent / flags["dataset_name"]
    modules = [f"transformers.models.{kind}.modeling_{kind}"] * bool(kind) + ["peft"] * bool(lora)

    def run(name: str, ranks: int, changes: dict, *more, env=None):
        return start_fork(9, ranks, folder / "out", SCRIPT, *flags_of(folder, name, folder / "model", **flags | changes),
                          *more, script=ROOT / "tests" / "support" / "checkpoint_runs.py", env=env, modules=modules)

    one, start, resume = run("one", 1, alone), 0, []
    for ranks, changes, end, stopped in links:
        env = {} if stopped is None else {"STOP": f"{stopped}:{end - start}:2"}
        printed = quiet(done := run("many", ranks, changes, *resume, env=env).result(), done.stdout)
        assert (f"stopped after step {end}, as it was told" in printed) == bool(env), printed
        start, resume = end, ["--resume", "auto" if end % 2 else checkpoint(folder, "many", end)]
    quiet(one.result())
    compare(*(metrics(folder / "runs", name) for name in ("one", "many")), "loss", "grad_norm", "learning_rate")
    every, ends = flags["eval_every"] or flags["max_steps"], {end for *_, end, stopped in links if stopped is None}
    one, many = ([json.loads(row) for row in open(folder / "runs" / name / "evaluation.jsonl")] for name in ("one", "many"))
    compare([row for row in one if row["step"] % every == 0 or row["step"] in ends], many, "evaluation_loss")
    return "equal"


def quiet(done, outcome: str = "") -> str:
    assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
    return outcome


def compare(expected: list[dict], found: list[dict], *names: str) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for name in names:
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=0, abs=1e-9), name


@pytest.fixture(scope="module")
def jobs(selected, tmp_path_factory):
    """case -> its folder, what was drawn, and the future of how it ended."""
    root, check = tmp_path_factory.mktemp("random"), {"topology": check_topology, "chain": check_chain}
    write_corpus(root)
    rows = [{"prompt": "So? " * (1 + i % 3), "completion": "word " * (1 + i * i % 16) + "."} for i in range(30)]
    (root / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with ThreadPoolExecutor(4) as pool:
        drawn = {case: (root / "-".join(map(str, case)), getattr(random_runs, case[0])(case[1]))
                 for case in selected("case")}
        yield {case: (folder, what, pool.submit(check[case[0]], folder, *what)) for case, (folder, what) in drawn.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_chance_has_drawn(jobs, ended, case):
    """It is equal or refused, without a traceback, and leaves no process."""
    folder, drawn, job = jobs[case]
    try:
        outcome = job.result()
        assert eventually(lambda: not left_behind(fork_server().process.pid), 20), "a process is left"
    except Exception as error:
        ended[case[0]]["fault"] += 1
        pytest.fail(f"{case} in {folder}: {drawn}\n{error}", pytrace=False)
    ended[case[0]][outcome] += 1
    shutil.rmtree(folder)
