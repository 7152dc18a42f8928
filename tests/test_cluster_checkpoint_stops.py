"""Runs of train_distributed.py that are stopped, killed, or diverge: what they leave, and that --resume auto goes on.

KILLS=30 pytest -m slow tests/test_cluster_checkpoint_stops.py kills so many runs at a random moment instead of 5.
"""

import contextlib
import os
import random
import signal
import time

import pytest
from lab.launch import fork, losses, metrics, modules_of, torchrun
from maintain.processes import eventually
from support.checkpoint_runs import (
    EXACT, SCRIPT, STEPS, TOPOLOGIES, checkpoint, flags_of, newest, write_corpus, write_model,
)

with modules_of(9):
    from checkpoints.files import check_file, read_state

TOLERANCE = 1e-9
TWO = {1: ["--num_microbatches", "2"], 2: ["--num_microbatches", "1,1"]}  # ranks -> two micro-batches a step
KILLS = int(os.environ.get("KILLS", 5))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    write_model(folder / "model", num_hidden_layers=2)
    write_corpus(folder)
    return folder


def words(folder, name, ranks=1, *more, **changes) -> list[str]:
    return [*flags_of(folder, name, folder / "model", **changes), *TWO[ranks], *map(str, more)]


def run(folder, name, ranks=1, *more, check=True, env=None, **changes):
    return fork(9, ranks, folder / "out", SCRIPT, *words(folder, name, ranks, *more, **changes), script=EXACT, env=env,
                check=check)


def test_the_step_that_runs_is_the_last(recorded, tmp_path):
    """Rank 1 is told to stop in the middle of step 3. The launcher hears that a checkpoint is written, which may take
    long. It was asked for more steps, so each rank ends with 130. The run goes on in one process."""
    variables = {"STOP": f"1:3:{signal.SIGINT}", "LAUNCH_CLUSTER_STOPS_WITHIN": str(tmp_path / "seconds"), "PLAIN": "1"}
    (tmp_path / "seconds").touch()
    flags = flags_of(tmp_path, "third", recorded / "model", dataset_name=recorded / "corpus", save_every=None)
    done = fork(9, 2, tmp_path, SCRIPT, *flags, "--num_microbatches", "5,3", script=EXACT, env=variables, check=False)
    assert done.returncode == 130 and len(metrics(tmp_path / "runs", "third")) == 3, done.stderr
    assert "stopped after step 3, as it was told: --resume auto goes on from there" in done.stdout, done.stdout
    assert newest(tmp_path, "third") == (saved := checkpoint(tmp_path, "third", 3))
    assert float((tmp_path / "seconds").read_text()) == 600
    printed = fork(9, 1, *flags, *TOPOLOGIES["one"][1], "--resume", "auto", script=SCRIPT).stdout
    assert f"going on after step 3: {saved}\n" in printed
    rows = metrics(tmp_path / "runs", "third")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), "each step once, in order"
    assert [row["loss"] for row in rows] == pytest.approx(losses(recorded / "runs", "one"), abs=TOLERANCE)
    assert os.listdir(tmp_path / "runs") == os.listdir(tmp_path / "checkpoints") == ["third"]


def test_a_loss_of_nan(folder):
    """Rank 1's weights become NaN after step 5: the next loss ends the run, and what step 4 saved is safe."""
    flags = dict(max_steps=8, save_every=2)
    done = run(folder, "diverged", 2, check=False, env={"POISON": "1:5"}, **flags)
    good = checkpoint(folder, "diverged", 4)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr, done.stderr
    assert "error: step 6 has the loss nan and the gradient norm nan: " in done.stderr
    assert "The last good checkpoint is that of step 4. Lower --learning_rate, and go on with --resume auto" in done.stderr
    assert newest(folder, "diverged") == good and check_whole(good)["step"] == 4
    assert [row["step"] for row in metrics(folder / "runs", "diverged")] == [1, 2, 3, 4, 5]


def test_a_lower_learning_rate_has_an_effect(recorded, tmp_path):
    """The message about a loss of NaN says to lower it and to resume."""
    flags = flags_of(tmp_path, "lower", recorded / "model", dataset_name=recorded / "corpus", max_steps=4,
                     save_every=None, warmup_steps=0, lr_decay="none", learning_rate=1e-5)
    fork(9, 1, *flags, *TOPOLOGIES["one"][1], "--resume", checkpoint(recorded, "one", 2), script=SCRIPT)
    rates = [row["learning_rate"] for row in metrics(tmp_path / "runs", "lower")]
    assert rates[2:] == [1e-5, 1e-5] and min(rates[:2]) > 1e-5


def test_keep_latest_and_metrics(folder):
    """Two of the newest are kept; a resumed run adds its rows; a run that is not resumed leaves the older one's."""
    flags = dict(save_every=2, keep=2)
    assert "going on" not in run(folder, "kept", 1, "--resume", "auto", max_steps=5, **flags).stdout
    saved = folder / "checkpoints" / "kept"
    assert sorted(os.listdir(saved)) == [".lock", "latest", "step_00000004", "step_00000005"]
    assert newest(folder, "kept").name == "step_00000005"
    run(folder, "kept", 2, "--resume", "auto", max_steps=9, **flags)
    assert sorted(os.listdir(saved)) == [".lock", "latest", "step_00000008", "step_00000009"]
    assert [row["step"] for row in metrics(folder / "runs", "kept")] == list(range(1, 10))
    done = run(folder, "kept", 1, "--resume", "auto", max_steps=8, **flags)
    assert f"nothing to do: {saved / 'step_00000009'} is that of step 9, of 8" in done.stdout
    done = run(folder, "kept", max_steps=3, **flags)
    assert f"checkpoints of an older run of the same name are now in {saved}.1\n" in done.stdout
    assert {"step_00000008", "step_00000009"} <= set(os.listdir(f"{saved}.1"))
    done = run(folder, "other", 1, "--resume", f"{saved}.1/step_00000008", max_steps=10, **flags)
    assert f"going on after step 8: {saved}.1/step_00000008\n" in done.stdout
    assert [row["step"] for row in metrics(folder / "runs", "other")] == list(range(1, 11)), "its checkpoint has rows"
    assert sorted(os.listdir(saved)) == [".lock", "latest", "step_00000002", "step_00000003"]
    assert [row["step"] for row in metrics(folder / "runs", "kept")] == [1, 2, 3]


def check_whole(path) -> dict:
    """All files are there as state.json has them. Returns its content."""
    state = read_state(str(path / "state.json"))
    problems = [check_file(str(path), name, facts) for name, facts in state["files"].items()]
    assert not any(problems), problems
    return state


@pytest.mark.slow
@pytest.mark.parametrize("number", range(KILLS))
def test_a_rank_is_killed(command, folder, number):
    """At a random moment, most often while it trains and saves. The run goes on, and ends as if nothing had happened.
    """
    seed = int(os.environ.get("SEED", random.randrange(1 << 32)))
    print(f"SEED={seed} kills at the same moment again")  # pytest shows it where the test fails
    generator = random.Random(seed)
    name, steps = f"killed{number}", 60
    flags = dict(max_steps=steps, save_every=2, keep=2)
    if not (folder / "runs" / "whole").exists():
        run(folder, "whole", 2, **flags)
    process = command(torchrun(2, EXACT, folder / "out", SCRIPT, *words(folder, name, 2, "--resume", "auto", **flags)))
    moment = 0 if generator.random() < 0.2 else generator.randrange(1, steps - 10)
    if moment:
        process.wait_for_step(folder / "runs" / name / "metrics.jsonl", moment)
        time.sleep(generator.random() * 0.05)
    else:
        assert eventually(lambda: len(process.ranks()) == 2)  # which takes longer where the cores are busy
        time.sleep(generator.uniform(0, 6))
    if ranks := process.ranks():
        with contextlib.suppress(ProcessLookupError):
            os.kill(generator.choice(list(ranks.values())), signal.SIGKILL)
    printed = process.end(60)
    where = f"seed {seed}, killed about step {moment}: {printed[-1500:]}"
    assert process.process.returncode or not ranks, where
    saved = folder / "checkpoints" / name
    if (saved / "latest").exists():
        assert check_whole(newest(folder, name))["step"] % 2 == 0, where
    left = sorted(saved.glob("step_*")) if saved.exists() else []
    for path in [path for path in left if not path.suffix][-flags["keep"]:]:  # one before these is being removed
        check_whole(path)
    run(folder, name, 2, "--resume", "auto", **flags)
    assert sorted(os.listdir(saved)) == [".lock", "latest", f"step_{steps - 2:08d}", f"step_{steps:08d}"], where
    rows = metrics(folder / "runs", name)
    assert [row["step"] for row in rows] == list(range(1, steps + 1)), where
    expected = losses(folder / "runs", "whole")
    assert [row["loss"] for row in rows] == pytest.approx(expected, abs=TOLERANCE), where
