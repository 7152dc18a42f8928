"""Command lines of cluster/ and files that chance has damaged: each ends well, or in one clear error.

    pytest tests/test_cluster_fuzz.py                                           a few of each
    FUZZ=300 pytest tests/test_cluster_fuzz.py -m "" -s                         300 of each, and how they ended
    FUZZ=300 pytest tests/test_cluster_fuzz.py -m "" -k "command_line and 17-"  one of them again

A clear error is exit code 2 and one line "error: ..." or, of a function, a UserError: no traceback, no error of
another library, and no more than LIMIT seconds. What fails prints its command line, or its file, which stays there.
"""

import argparse
import functools
import json
import os
import random
import re
import shlex
import shutil
import sys
from collections import Counter

import fuzz
import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import SCRIPT, flags_of
from fuzz import RUN
from launch import ROOT, fork, modules_of, start_fork

with modules_of(9):
    import generate
    import hosts
    import launch_cluster
    import plan
    import process_group_manager as pgm
    import three_stages_simple_pp
    import train_distributed
    from pipeline_stage import PipelineStage
    from pipeline_template import PipelineTemplate
    from planning.machines import Setting
    from planning.report import make_plan
    from checkpoints import files as checkpoint_files, load as resume
    from training import layout, models, plan_file
    from checkpoints.disks import Disks

LIMIT, QUICK_COMMANDS, QUICK_FILES = 20, 5, 15  # seconds of a case, cases that every run has
CASES = int(os.environ.get("FUZZ", 0))
CPU, WEIGHTS = torch.device("cpu"), f"{RUN}/model-00001-of-00001.safetensors"


def seeds(quick: int) -> list:
    """The first ones without a mark, a tenth of 300 for `slow`, and all of them where FUZZ says how many."""
    more = [pytest.param(seed, marks=pytest.mark.slow, id=f"{seed}-") for seed in range(quick, max(30, CASES))]
    return [*(pytest.param(seed, id=f"{seed}-") for seed in range(quick)), *more]


@pytest.fixture(scope="module")
def ended():
    """Counts how cases ended, and prints it."""
    counts = {"command lines": Counter(), "files": Counter()}
    yield counts
    print("".join(f"\n{kind}: {sum(each.values())} cases, {dict(each)}" for kind, each in counts.items() if each))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with one of each file, and the checkpoints of a run, all of which are as they should be."""
    folder = tmp_path_factory.mktemp("good")
    fuzz.write_good_files(folder, lambda cluster: make_plan(cluster, 4, Setting("1f1b"), [1]))
    flags = flags_of(folder, "run", folder / "model", max_steps=4, save_every=2)
    fork(9, 1, *flags, "--num_microbatches", 2, script=SCRIPT)
    return folder


def copy(good, folder, damaged: str | None, seed: int):
    """A copy of the good files, one of which is damaged; the checksums of a checkpoint may have been made to fit."""
    shutil.copytree(good, folder, symlinks=True)
    if damaged:
        rng, path = random.Random(seed), folder / damaged
        path.write_bytes(fuzz.damage(rng, damaged, path.read_bytes()))
        state = path.parent / "state.json"
        if rng.random() < 0.6 and state.exists():
            fuzz.forge(state, path, checkpoint_files)
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
    """seed -> (folder, how to start it by hand, the run), all at the same time."""
    modules = train_distributed, generate, plan, three_stages_simple_pp, launch_cluster
    actions = {module.__name__: actions_of(module) for module in modules}
    root, jobs = tmp_path_factory.mktemp("commands"), {}
    for seed in selected("command"):
        script, words, ranks, damaged = fuzz.command_line(seed, actions)
        path, folder = ROOT / fuzz.SCRIPTS[script][1], copy(good, root / str(seed), damaged, seed)
        env = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        job = start_fork(9, ranks, folder, path, *words, script=fuzz.__file__, check=False, timeout=LIMIT, env=env)
        torchrun = f"torchrun --nproc_per_node {ranks} " if ranks > 1 else ""
        shown = f"cd {folder} && {torchrun}{path} {shlex.join(words)}\n(seed {seed}; damaged: {damaged})"
        jobs[seed] = folder, shown, job
    return jobs


def judge(code: int, stderr: str) -> str:
    """How a command line has ended. Raises AssertionError for what is neither a success nor one clear error."""
    errors = re.findall(r"^(?:launch_cluster.sh: )?error: .", stderr, re.MULTILINE)
    has_trace = re.search(r"^\s*(Traceback|Timeout|Fatal|thread '|File \")|frame #", stderr, re.MULTILINE)
    no_host = re.search("^launch_cluster: .* failed first, with exit code 255$", stderr, re.MULTILINE)
    is_clear = code == 2 and len(errors) == 1 or code == 255 and no_host or code == 1 and not stderr  # 1: --check
    assert not has_trace and (is_clear or code == 0 and not errors), f"exit code {code}:\n{stderr[-3000:]}"
    return "success" if code == 0 else "clear error"


@pytest.mark.parametrize("code, stderr", [
    (0, "error: x"), (1, "error: x"), (2, ""), (2, "error: x\nerror: y"), (2, "Traceback (most\nerror: x"), (-9, ""),
    (1, 'Timeout (0:00:20)!\nThread 0x1:\n  File "x.py"'), (2, "error: x (frame #0: c10"), (2, "error: ")])
def test_what_is_not_clear(code, stderr):
    with pytest.raises(AssertionError):
        judge(code, stderr)
    assert judge(0, "") == "success" and judge(2, "a warning\nerror: x") == "clear error"


@pytest.mark.parametrize("command", seeds(QUICK_COMMANDS))
def test_a_command_line(commands, ended, command):
    folder, shown, job = commands[command]
    try:
        outcome = judge(job.result().returncode, job.result().stderr)
    except AssertionError as error:
        ended["command lines"]["fault"] += 1
        pytest.fail(f"{shown}\n{error}", pytrace=False)
    ended["command lines"][outcome] += 1
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """One process. Nothing is pickled for other ones: it would be an error of a module that is gone."""
    folder = tmp_path_factory.mktemp("group")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    pgm.setup_process_group_manager([1], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "once_per_machine", lambda make: make())
        patch.setattr(layout, "from_home", lambda make: make())
        patch.setattr(layout, "gather", lambda value: [value] * 2)
        patch.setattr(plan_file, "gather", lambda value: [value])
        patch.setattr(hosts, "find_address", lambda host: host.to)
        yield
    dist.destroy_process_group()


def arguments(module=train_distributed, **flags) -> argparse.Namespace:
    flags = {**fuzz.TRAINING, **flags} if module is train_distributed else flags
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", *(word for name in flags for word in (f"--{name}", flags[name]))])
        found = module.parse_args()
        return found


def is_clear(error: BaseException) -> bool:
    """Whether one_clear_error reports it in one line. Test modules may have imported utils.py of step 9 anew."""
    is_users = any(each.__name__ == "UserError" for each in type(error).__mro__) and "frame #" not in str(error)
    return is_users or isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def each_of(*functions) -> None:
    """Calls all of them, and then raises the first clear error."""
    errors = []
    for function in functions:
        try:
            function()
        except Exception as error:
            if not is_clear(error):
                raise
            errors.append(error)
    if errors:
        raise errors[0]


def train_a_step(model_name: str = "model", weights=None, loader=None) -> None:
    """What train_distributed.py does on one rank, with the weights that it finds or with initial ones."""
    args = arguments(model_name=model_name)
    made = models.with_weights(models.make_model(args, torch.float64), args, CPU, weights is not None)
    template = PipelineTemplate.from_layers_per_stage(made.model, [made.model.config.num_hidden_layers])
    stage, ids = PipelineStage(made.model.double(), template, 0), torch.zeros(1, 16, dtype=torch.int64)
    (weights or made.initial or str)(stage)  # models of transformers have theirs already
    optimizer = torch.optim.AdamW(stage.model.parameters(), fused=True)
    if loader:
        loader.load_optimizer(optimizer, stage)
    made.criterion(stage(None, input_ids=ids), {"target_ids": ids}).backward()
    optimizer.step()
    json.loads(made.files["config.json"])


def read_plan(name: str = "plan.json") -> None:
    args = arguments(plan=name)
    made = models.make_model(args, torch.float64)
    plan = plan_file.find_plan(args, made, CPU, torch.float64)
    layout.choose_layout(args, made, plan, None, CPU, torch.float64).form(args, made.model.config)


def read_cluster() -> None:
    """As plan.py, train_distributed.py on two ranks, and an elastic run that has lost a host read it."""
    args, old = arguments(plan, measure="-", global_batch="4", out="out.json"), plan_file.read_plan("plan2.json")
    args.cluster_json = "cluster.json"
    made = plan_file.plan_for(old["hosts"][:1], old, "cluster.json")
    assert "error" in made or plan_file.machines_of(made) == [0]
    each_of(lambda: plan.plan(args),
            lambda: layout.measured_speeds(arguments(cluster_json="cluster.json"), 1, torch.float64))


def go_on_from(wanted: str, disks: Disks) -> None:
    if found := resume.find_checkpoint(wanted, "checkpoints/run", disks):
        run = argparse.Namespace(found=found, args=arguments(seed="42"))
        layout.micro_batches_of(found, run.args.batch_size)
        train_distributed.Run.check(run, found.state["names"], 2, 16)
        loader = resume.Loader(found, disks, CPU)
        train_a_step(weights=loader.weights, loader=loader)
        assert 0 <= found.state["step"] < 1 << 40, "Run.begin makes so many steps of the scheduler"


def read_checkpoint() -> None:
    """As --resume does: the path, the run's folder, and auto."""
    disks = Disks("checkpoints/run")
    each_of(*(functools.partial(go_on_from, wanted, disks) for wanted in (RUN, "checkpoints/run", "auto")))


def read_latest() -> None:
    each_of(lambda: generate.find("checkpoints/run", "--checkpoint", ("config.json",)), read_checkpoint)


def read_published() -> None:
    """As --init_from and generate.py read a directory."""
    def load() -> None:
        weights = resume.published_weights(RUN)
        train_a_step(weights=lambda stage: weights(stage, CPU))

    each_of(lambda: generate.find(RUN, "--checkpoint", ("config.json",)), load)


def read_single_file() -> None:
    os.replace(WEIGHTS, f"{RUN}/model.safetensors")
    os.remove(f"{RUN}/model.safetensors.index.json")
    read_published()


READERS = [  # file, what reads it
    ("hosts.txt", lambda: hosts.read_hosts("hosts.txt")), ("plan.json", read_plan), ("cluster.json", read_cluster),
    (f"{RUN}/state.json", read_checkpoint), ("checkpoints/run/latest", read_latest),
    ("model/config.json", train_a_step), ("gpt2/config.json", functools.partial(train_a_step, "gpt2")),
    (f"{RUN}/model.safetensors.index.json", read_published), (WEIGHTS, read_published), (WEIGHTS, read_single_file),
    (WEIGHTS, read_checkpoint), (f"{RUN}/optimizer-00001-of-00001.safetensors", read_checkpoint),
]


@pytest.mark.parametrize("file", seeds(QUICK_FILES))
def test_a_file(good, group, ended, tmp_path, monkeypatch, file):
    name, read = READERS[file % len(READERS)]
    folder, outcome = copy(good, tmp_path / "copy", name, file), "success"
    monkeypatch.chdir(folder)
    try:
        with fuzz.limits(LIMIT):
            read()
    except BaseException as error:
        outcome = "clear error"
        if not is_clear(error):
            ended["files"]["fault"] += 1
            print(f"{folder / name} (seed {file})")
            raise
    ended["files"][outcome] += 1
    shutil.rmtree(folder)
