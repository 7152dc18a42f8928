"""One training over three hosts that share no disk, through all that happens to a run at home, with slow steps.

It is stopped with Ctrl-C, goes on under another topology, loses a host that comes back with an older run of the same
name on its disk, is stopped again, finds a disk wiped, and goes on to its end. Its rows are those of one process that
nobody disturbs, on the host on which it was started. There the checkpoint of its first stop writes a text, and its
last one. That host is node1: in an elastic run torchrun gives rank 0 to node0, whose address is the lowest.

The steps take ten seconds until the first Ctrl-C, which waits for the one that runs, and less from then on; with
ALL_WAYS=1 they take ten seconds throughout.
"""

import os
import re
import shutil
import sys
import time

import pytest
from bed import NODES, bed, on_disk, testbed
from elastic_bed import Training, kill_all, nothing_runs, switch_on
from launch import ROOT, environment, fork, metrics

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__)]
LONG, SHORT = 10, 10 if os.environ.get("ALL_WAYS") else 0.5  # seconds of a step
TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 60
FLAGS = ["--seq_len", 16, "--dtype", "float64", "--batch_size", 1, "--num_hidden_layers", 4, "--device", "cpu",
         "--equal_shares"]
SCRIPT, OLD_STEPS = "cluster/train_distributed.py", 300  # more than the training makes, so that the older run is ahead
FIRST, LOST, STARTED = "node0", "node2", "node1"  # rank 0 of an elastic run; the host that is wiped; see above


def train(folder, seconds: float, *words, launcher=("--elastic", "2:3")) -> Training:
    """The training on the three hosts, started on one of them, with steps of so many seconds."""
    order = [STARTED, *(node for node in NODES if node != STARTED)]
    return Training(folder, "tests/support/checkpoint_runs.py", "-", SCRIPT, *words, nodes=order, started_on=STARTED,
                    launcher=[*launcher, "--env", f"SLOW={seconds}"])


def stop(run: Training) -> int:
    """The step after which it stopped: the last one that is said, as a host came back."""
    return int(re.findall(r"stopped after step (\d+)", run.stop())[-1])


@pytest.fixture
def old_run(bed, tmp_path):
    """Trains on one host, and puts what that leaves on its disk into a folder: another run of the same name."""
    (tmp_path / "corpus").mkdir()
    for i in range(4):
        (tmp_path / "corpus" / f"{i}.txt").write_text(f"{i}. {TEXT[i:]}")
    testbed("own", tmp_path / "corpus")
    testbed("exec", FIRST, sys.executable, "-m", "torch.distributed.run", "--standalone", SCRIPT, *FLAGS,
            "--dataset_name", tmp_path / "corpus", "--num_microbatches", 6, "--learning_rate", 1e-3, "--max_steps",
            OLD_STEPS, "--save_every", OLD_STEPS, "--run_name", "story", "--log_dir", "runs", cwd=ROOT,
            env=environment(), timeout=180)
    for name in ("runs", "checkpoints"):
        shutil.copytree(on_disk(FIRST, ROOT / name), tmp_path / "old" / name)
    testbed("wipe", FIRST)
    return tmp_path / "old"


def test_a_run_that_has_everything_happen_to_it(old_run, tmp_path):
    flags = [*FLAGS, "--dataset_name", tmp_path / "corpus", "--learning_rate", 1e-4]
    words = [*flags, "--save_every", 4, "--run_name", "story", "--log_dir", "runs", "--max_steps", 200]
    run = train(tmp_path, LONG, *words, "--pipelines", "2,1,1", "--num_microbatches", 6, launcher=())
    run.wait(lambda: run.steps()[-1:] == [2])
    time.sleep(0.2 * LONG)
    assert stop(run) == 3, "the step that ran was the last one"
    check_text()

    two = ["--pipelines", "4;2,2|2,2", "--num_microbatches", "4,2|6", "--resume", "auto"]
    run = train(tmp_path, SHORT, *words, *two)
    assert run.went_on(3) == 3
    run.reaches(6)
    mark, last = run.mark(), run.steps()[-1]
    kill_all(FIRST)
    assert (without := run.went_on(2, mark)) >= last, "the hosts that are left have all of the model"
    figures = f"last step seen {last}, on two hosts after step {without}"
    testbed("wipe", FIRST)
    for name in ("runs", "checkpoints"):
        shutil.copytree(old_run / name, on_disk(FIRST, ROOT / name), dirs_exist_ok=True)
    mark, last = run.mark(), run.steps()[-1]
    switch_on(FIRST)
    assert last <= (again := run.went_on(3, mark)) < OLD_STEPS
    stopped = stop(run)
    figures += f"; on three again after step {again}, stopped after step {stopped}"

    testbed("wipe", LOST)
    end = ["--max_steps", stopped + 3, "--pipelines", "1,2,1|2,2", "--num_microbatches", 6, "--resume", "auto"]
    run = train(tmp_path, SHORT, *words, *end)
    assert run.went_on(3) == stopped
    code, text = run.run.end(150)
    assert code == 0 and nothing_runs(), text
    check_text()

    fork(9, 1, *flags, "--num_microbatches", 6, "--max_steps", stopped + 3, "--run_name", "one", "--log_dir", tmp_path,
         "--checkpoint_dir", tmp_path / "checkpoints", script=ROOT / SCRIPT)
    found, expected = metrics(on_disk(STARTED, ROOT / "runs"), "story"), metrics(tmp_path, "one")
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert (worst := max(abs(a[key] - b[key]) for a, b in zip(found, expected))) <= 1e-9
        figures += f"; largest difference of {key} {worst:.1e}"
    print(f"stopped after step 3; {figures} in {len(found)} steps")


def check_text() -> None:
    """The host on which the run was started has a checkpoint from which it can write."""
    done = testbed("exec", STARTED, sys.executable, "cluster/generate.py", "--checkpoint", "checkpoints/story",
                   "--prompt", "It was", "--max_new_tokens", 3, cwd=ROOT, env=environment())
    assert done.stdout.startswith("It was"), done.stdout
