"""Command lines of cluster/ and files that chance has damaged: each ends well, or in one clear error.

    pytest tests/test_cluster_fuzz.py                                a few of each
    FUZZ=300 pytest tests/test_cluster_fuzz.py -m "" -s              300 of each, and how they ended
    FUZZ=300 pytest tests/test_cluster_fuzz.py -m "" -k "words-17-"  one of them again

A clear error is exit code 2 and one line "error: ...": no traceback, no error of another library, and no more than
LIMIT seconds. What fails prints its command line; its folder stays there.
"""

import argparse
import os
import random
import re
import shlex
import shutil

import fuzz
import pytest
from checkpoint_runs import SCRIPT, flags_of
from launch import ROOT, fork, modules_of, start_fork

with modules_of(9):
    import generate
    import launch_cluster
    import plan
    import three_stages_simple_pp
    import train_distributed
    from planning.machines import Cluster, Setting
    from planning.report import as_plan
    from planning.search import find_plans

LIMIT = 20  # seconds of a case
QUICK = {"words": 5, "file": 5}  # kind of a case -> how many every run has
SEEDS = max(30, int(os.environ.get("FUZZ", 0)))  # the other ones of 30 are for `slow`
CASES = [pytest.param((kind, seed), marks=pytest.mark.slow if seed >= quick else (), id=f"{kind}-{seed}-")
         for kind, quick in QUICK.items() for seed in range(SEEDS)]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with one of each file, and the checkpoints of a run, all of which are as they should be."""
    folder = tmp_path_factory.mktemp("good")

    def make_plan(data: dict) -> dict:
        cluster = Cluster(data)
        return as_plan(cluster, find_plans(cluster, 4, Setting("1f1b"), [1]))

    fuzz.write_good_files(folder, make_plan)
    flags = flags_of(folder, "run", folder / "model", max_steps=4, save_every=2)
    fork(9, 1, *flags, "--num_microbatches", 2, script=SCRIPT)
    return folder


def copy(good, folder, damaged: str | None, seed: int):
    """A copy of the good files, one of which is damaged."""
    shutil.copytree(good, folder, symlinks=True)
    if damaged:
        rng, path = random.Random(seed), folder / damaged
        path.write_bytes(fuzz.damage(rng, damaged, path.read_bytes()))
    return folder


class Found(Exception):
    """A parser that is about to read a command line."""


def actions_of(module) -> list:
    def stop(self, *_):
        raise Found(self)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Found) as found:
        patch.setattr(argparse.ArgumentParser, "parse_args", stop)
        module.parse_args()
    return found.value.args[0]._actions


@pytest.fixture(scope="module")
def commands(good, tmp_path_factory, selected):
    """case -> (folder, how to start it by hand, the run), all at the same time."""
    modules = train_distributed, generate, plan, three_stages_simple_pp, launch_cluster
    actions = {module.__name__: actions_of(module) for module in modules}
    root, jobs = tmp_path_factory.mktemp("commands"), {}
    for kind, seed in selected("case"):
        script, words, ranks, damaged = fuzz.command_line(seed, actions, only_a_file=kind == "file")
        path, folder = ROOT / fuzz.SCRIPTS[script][1], copy(good, root / f"{kind}{seed}", damaged, seed)
        env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        job = start_fork(9, ranks, folder, path, *words, script=fuzz.__file__, check=False, timeout=LIMIT, env=env)
        torchrun = f"torchrun --nproc_per_node {ranks} " if ranks > 1 else ""
        shown = f"cd {folder} && {torchrun}{path} {shlex.join(words)}\n(seed {seed}; damaged: {damaged})"
        jobs[kind, seed] = folder, shown, job
    return jobs


def judge(code: int, stderr: str) -> str:
    """How a command line has ended. Raises AssertionError for what is neither a success nor one clear error."""
    errors = re.findall(r"^(?:launch_cluster.sh: )?error: .", stderr, re.MULTILINE)
    has_trace = re.search(r"^\s*(Traceback|Timeout|Fatal|thread '|File \")|frame #", stderr, re.MULTILINE)
    no_host = re.search("^launch_cluster: .* failed first, with exit code 255$", stderr, re.MULTILINE)
    is_clear = code == 2 and len(errors) == 1 or code == 255 and no_host or code == 1 and not stderr  # 1: --check
    assert not has_trace and (is_clear or code == 0 and not errors), f"exit code {code}:\n{stderr[-3000:]}"
    return "success" if code == 0 else "clear error"


@pytest.mark.parametrize("case", CASES)
def test_a_command_line(commands, ended, case):
    """With words, or only a file, that chance has damaged."""
    folder, shown, job = commands[case]
    try:
        outcome = judge(job.result().returncode, job.result().stderr)
    except AssertionError as error:
        ended[case[0]]["fault"] += 1
        pytest.fail(f"{shown}\n{error}", pytrace=False)
    ended[case[0]][outcome] += 1
    shutil.rmtree(folder)
