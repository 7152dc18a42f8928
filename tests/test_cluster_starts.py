"""Starts of train_distributed.py that belong together, or do not: after a lost host, by Slurm, beside an older run.

Hosts are folders here, in which a rank each has relative paths: they share no disk.
"""

import os
import shutil

import pytest
from lab.launch import losses, metrics, modules_of, start_fork
from support.checkpoint_runs import EXACT, SCRIPT, flags_of, write_corpus, write_model

with modules_of(9):
    from checkpoints.files import check_file, read_state
    from ranks import disks
    from run.start import launch_id
    from utils import UserError

OLDER, TOLERANCE = 6, 1e-9  # the last step of the older run
ELASTIC = {"TORCHELASTIC_MAX_RESTARTS": "1"}


@pytest.fixture
def train(older, tmp_path):
    """train(hosts, name, max_steps, *flags, **env) -> the finished job. Host b has an older run "home"."""
    (tmp_path / "a").mkdir()
    shutil.copytree(older / "b", tmp_path / "b")

    def train(hosts, name, max_steps, *more, check=True, **env):
        return start(older, tmp_path, hosts, name, max_steps, *more, check=check, **env).result()

    train.folder = tmp_path
    return train


def start(data, folder, hosts, name, max_steps, *more, check=True, **env):
    flags = flags_of(data, name, data / "model", max_steps=max_steps, save_every=2, lr_decay="none", log_dir="runs",
                     checkpoint_dir="checkpoints")
    return start_fork(9, len(hosts), folder, SCRIPT, *flags, "--num_microbatches", "2" if len(hosts) == 1 else "1,1",
                      *more, script=EXACT, check=check, env={"DISKS": ",".join(hosts), **env})


@pytest.fixture(scope="module")
def older(tmp_path_factory):
    """The folder of model and corpus, with a run "home" of OLDER steps on host b, and undisturbed steps on host c."""
    folder = tmp_path_factory.mktemp("older")
    write_model(folder / "model", num_hidden_layers=1)
    write_corpus(folder)
    for host in "bc":
        (folder / host).mkdir()
    jobs = start(folder, folder, "b", "home", OLDER, "--learning_rate", 1e-2), start(folder, folder, "c", "whole", 8)
    assert not any(job.result().returncode for job in jobs)
    return folder


def saved(train, host: str, name: str) -> list[str]:
    return sorted(path.name for path in (train.folder / host / "checkpoints" / name).glob("step_*"))


def went_on(job) -> list[str]:
    return [line.rpartition("going on after step ")[2].split(":")[0] for line in job.stdout.splitlines()
            if "going on after" in line]


LAUNCHES = {  # name -> the environment of start k
    "elastic": lambda k: {**ELASTIC, "TORCHELASTIC_RUN_ID": "launch"},
    "slurm": lambda k: {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(k)},
}


@pytest.mark.parametrize("kind, name", [("elastic", "other"), ("slurm", "home")])
def test_a_directory_counts_for_the_first_start(train, kind, name):
    """Of one launch. Another launch with that flag goes back, and keeps what was trained since under another name."""
    flags = ["--resume", train.folder / "b" / "checkpoints" / "home" / f"step_{OLDER - 2:08d}"]
    assert went_on(train("b", name, OLDER, *flags, **LAUNCHES[kind](0))) == [str(OLDER - 2)]
    again = train("b", name, OLDER + 2, *flags, **LAUNCHES[kind](1))
    assert went_on(again) == [str(OLDER)] and saved(train, "b", name)[-1] == f"step_{OLDER + 2:08d}"
    assert [row["step"] for row in metrics(train.folder / "b" / "runs", name)] == list(range(1, OLDER + 3))
    assert (f"{name}.2" if name == "home" else f"{name}.1") not in os.listdir(train.folder / "b" / "checkpoints")
    env = {"SLURM_JOB_ID": "8"} if kind == "slurm" else {**ELASTIC, "TORCHELASTIC_RUN_ID": "next"}
    assert went_on(train("b", name, OLDER, *flags, **env)) == [str(OLDER - 2)]
    assert f"step_{OLDER + 2:08d}" not in saved(train, "b", name)


def test_a_late_host_with_an_older_run(train, older):
    """Its checkpoint is of a later step, and its rows are as many. It is left in peace, and the files come whole."""
    env = {**ELASTIC, "TORCHELASTIC_RUN_ID": "launch"}
    train("a", "home", 4, **env)
    assert went_on(train("ba", "home", 8, **env)) == ["4"]
    for host in "ab":
        assert saved(train, host, "home")[-1] == "step_00000008"
        assert losses(train.folder / host / "runs", "home") == pytest.approx(losses(older / "c/runs", "whole"),
                                                                             abs=TOLERANCE)
        path = train.folder / host / "checkpoints" / "home" / "step_00000008"
        assert not any(check_file(path, *facts) for facts in read_state(path / "state.json")["files"].items())
    assert saved(train, "b", "home.1") == [f"step_{step:08d}" for step in (2, 4, OLDER)]
    assert losses(train.folder / "b" / "runs", "home.1") == losses(older / "b" / "runs", "home")


def test_unlike_runs_on_two_hosts(train, older):
    """Nobody can know which is to go on: an error, and nothing is moved. Without a checkpoint, by which they could be
    told, rows of the same name do not count."""
    train("a", "home", 4)
    done = train("ab", "home", 8, "--resume", "auto", check=False)
    assert done.returncode == 2 and done.stderr.count("error: ") == 1, done.stderr
    assert "checkpoints of unlike runs: step_00000004 on " in done.stderr and "step_00000006 on " in done.stderr
    assert [saved(train, "a", "home")[-1], saved(train, "b", "home")[-1]] == ["step_00000004", "step_00000006"]
    shutil.rmtree(train.folder / "b" / "checkpoints")
    assert went_on(train("ba", "home", 8, "--resume", "auto")) == ["4"]
    for host in "ab":
        assert losses(train.folder / host / "runs", "home") == pytest.approx(losses(older / "c/runs", "whole"),
                                                                             abs=TOLERANCE)
    assert losses(train.folder / "b" / "runs", "home.1") == losses(older / "b" / "runs", "home")


def test_own_disks_for_checkpoints_and_one_for_metrics(train):
    """Two hosts, of which each keeps its checkpoints, mount one folder for the metrics: one rank writes there."""
    train("ab", "mounted", 2, "--log_dir", train.folder / "logs")
    assert saved(train, "a", "mounted") == saved(train, "b", "mounted") == ["step_00000002"]
    assert len((train.folder / "logs" / "mounted" / "metrics.jsonl").read_text().splitlines()) == 2


def test_an_elastic_launch_needs_an_id(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UserError, match="without --rdzv-id"):
        launch_id("auto")
    monkeypatch.setenv("ELASTIC_RUN", '{"id": "of launch_cluster.sh"}')
    assert launch_id(None) == ("of launch_cluster.sh", True)


def test_no_start_is_misled_by_what_another_left(world_of_one, monkeypatch, tmp_path):
    """A start that is killed leaves its probes. Names are new each time, and one that ends well removes them."""
    with monkeypatch.context() as killed:
        killed.setattr(os, "remove", lambda path: None)
        for _ in range(2):
            assert disks.Disks(str(tmp_path)).leads
    assert len(left := os.listdir(tmp_path)) == 2
    assert disks.Disks(str(tmp_path)).leads and sorted(os.listdir(tmp_path)) == sorted(left)


def test_a_file_that_cannot_be_sent(run_code, tmp_path):
    """The receiver does not wait for the rest of it, and no part of a file is left. Both ranks know the error. On a
    terminal a bar shows each file."""
    for name, content in (("a/file", "0123456789"), ("a/taken", "a file"), ("b/taken/deep", "a file in a folder")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    run_code("cluster", 2, """
import io, os, process_group_manager as pgm
from ranks import disks, progress
progress.DELAY, streams = 0, (sys.stdout, sys.stderr)
sys.stdout = sys.stderr = screen = io.StringIO()
screen.isatty = lambda: True
pgm.init_process_group("gloo")
os.chdir(os.path.join(sys.argv[1], "ab"[int(os.environ["RANK"])]))
ours, disks.CHUNK = disks.Disks("."), 4
for name, said in ("file", None), ("missing", "No such file"), ("taken", "directory"):
    try:
        ours.copy(".", [(name, 0, 1)])
        assert said is None, name
    except disks.UserError as error:
        assert said and said in str(error), error
sys.stdout, sys.stderr = streams
bar = ["sending", "receiving"][int(os.environ["RANK"])]
assert f"{bar} file: " in screen.getvalue() and screen.getvalue().endswith("\\r"), screen.getvalue()
""", tmp_path, env={"TERM": "xterm"})
    assert sorted(os.listdir(tmp_path / "b")) == ["file", "taken"] and (tmp_path / "b/file").read_text() == "0123456789"
