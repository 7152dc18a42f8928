"""Checkpoints that are damaged, of another model, or can't be written: one clear error that names the file, or the
checkpoint before, and the training goes on."""

import json
import os
import pickle
import shutil
import subprocess

import pytest
import torch
from lab.launch import losses, modules_of, start_fork
from support.checkpoint_runs import SCRIPT, STEPS, checkpoint, flags_of, newest, tensors_of

with modules_of(9):
    from checkpoints import files as checkpoint_files
    from checkpoints.folder import Lock
    from checkpoints.resume import find_checkpoint, look_at, run_of
    from ranks.disks import Disks
    from ranks.files import facts_of
    from stage_weights import open_directory
    from utils import UserError

OLDER, NEWER = 2, 4
WEIGHTS = "model-00001-of-00001.safetensors"


def words(folder, name, *more, model="model", **changes) -> list:
    flags = flags_of(folder, name, folder / model, **{"save_every": 2, "keep": STEPS, **changes})
    return [*flags, "--num_microbatches", 8, *more]


def start(folder, name, *more, ranks=1, **changes):
    return start_fork(9, ranks, *words(folder, name, *more, **changes), script=SCRIPT, check=False)


@pytest.fixture(scope="module")
def saved(recorded, tmp_path_factory):
    """A folder with the recorded run's model and corpus, and in `copy` its checkpoints of
    steps 2 and 4."""
    folder = tmp_path_factory.mktemp("bad")
    for name in "model", "corpus":
        shutil.copytree(recorded / name, folder / name)
    for step in OLDER, NEWER:
        shutil.copytree(path := checkpoint(recorded, "one", step), folder / "copy" / path.name)
    (folder / "copy" / "latest").write_text(f"{path.name}\n")
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved / "copy", tmp_path / "run")


@pytest.fixture
def disks(world_of_one):
    """Of a group of one process."""
    return lambda path: Disks(str(path))


DAMAGES = {  # name -> the file, what its content becomes (None: it is removed), what is said of it
    "truncated": (WEIGHTS, lambda content, _: content[:1000], "has 1000 bytes instead of"),
    "a flipped bit": (WEIGHTS, lambda content, _: content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
                      "has another checksum than when it was written"),
    "removed": (WEIGHTS, None, "is missing"),
    "half a state": ("state.json", lambda content, _: content[:-200], "can't be read"),
    "another state": ("state.json", lambda content, _: content.replace(b'"step": 4', b'"step": 3'),
                      "its checksum is not that of its content"),
    "no state": ("state.json", None, ""),
}
FORGED = {  # name -> what state.json becomes, whose checksum is then made right; what is said
    "files outside": (lambda state: json.loads(json.dumps(state).replace(f'"{WEIGHTS}"', f'"../{WEIGHTS}"')),
                      (WEIGHTS, "is not a file of that folder")),
    "a field is lost": (lambda state: {name: state[name] for name in state if name != "files"},
                        ("state.json", "can't be read")),
}


def damage(path, kind: str) -> tuple[str, str]:
    """Does to a checkpoint what the tables have under that name. The file, and what is said of it."""
    if kind == "a link":
        shutil.move(path / WEIGHTS, path.parent / WEIGHTS)
        (path / WEIGHTS).symlink_to(path.parent / WEIGHTS)
        return WEIGHTS, "is not a file of that folder"
    if kind in FORGED:
        shutil.copy(path / WEIGHTS, path.parent)
        change, said = FORGED[kind]
        forge(path, change)
        return said
    file, change, said = DAMAGES[kind]
    if change:
        (path / file).write_bytes(change((path / file).read_bytes(), path))
    else:
        (path / file).unlink()
    return file, said


def forge(path, change) -> None:
    """Changes state.json and makes its checksum right, as only somebody could who wants to."""
    state = str(path / "state.json")
    checkpoint_files.write_state(state, change(checkpoint_files.read_state(state)))


@pytest.mark.parametrize("kind", [*DAMAGES, *FORGED, "a link"])
def test_a_damaged_checkpoint(copied, disks, capsys, kind):
    """--resume DIR: an error that names the file. --resume auto: the one before, and it says why."""
    path, ours = copied / f"step_{NEWER:08d}", disks(copied)
    file, what = damage(path, kind)
    for wanted in path, copied:  # `latest` in the run's folder names the same one
        (copied / "latest").write_text(f"{path.name}\n")
        with pytest.raises(UserError) as error:
            find_checkpoint(str(wanted), str(copied), ours)
        assert file in str(error.value) and what in str(error.value) and "--resume auto" in str(error.value)
    found = find_checkpoint("auto", str(copied), ours)
    assert (found.name, found.state["step"]) == (f"step_{OLDER:08d}", OLDER)
    printed = capsys.readouterr().out
    assert f"the checkpoint {path.name} is not whole: " in printed and "Falling back to the one before" in printed
    assert file in printed and what in printed
    damage(copied / f"step_{OLDER:08d}", "removed")
    assert find_checkpoint("auto", str(copied), ours) is None


def test_latest_that_leads_elsewhere(copied, disks):
    (copied / "latest").write_text(f"../run/step_{NEWER:08d}\n")
    with pytest.raises(UserError, match="latest names '../run/step.*which is no folder beside it"):
        find_checkpoint(str(copied), str(copied), disks(copied))
    (copied / "latest").write_text("step_00000099\n")
    with pytest.raises(UserError, match="step_00000099/state.json"):
        find_checkpoint(str(copied), str(copied), disks(copied))
    assert find_checkpoint("auto", str(copied), disks(copied)).state["step"] == NEWER
    with pytest.raises(UserError, match="nowhere/state.json is on no disk"):
        find_checkpoint(str(copied / "nowhere"), str(copied), disks(copied))


@pytest.mark.parametrize("weight_map, expected", [
    ({"a": "../x.safetensors"}, "names '../x.safetensors', which is not a file of that folder"),
    ({"a": "/etc/passwd"}, "names '/etc/passwd'"), ({"a": ""}, "can't be read"), ({"a": 1}, "names 1, which"),
    (None, "can't be read"),
])
def test_an_index_that_leads_elsewhere(tmp_path, weight_map, expected):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError) as error:
        open_directory(str(tmp_path))["a"]()
    assert str(tmp_path) in str(error.value) and expected in str(error.value)


def test_a_lock_that_cant_be_opened(disks, tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="can't write .*lock: Is a directory: make room, or choose another"):
        Lock(disks(tmp_path))


def test_a_start_that_fails_leaves_older_checkpoints(saved):
    """A new run of the same name whose weights turn out to be damaged when its stage is made."""
    shutil.copytree(saved / "copy", older := saved / "checkpoints" / "again")
    shutil.copytree(older / f"step_{NEWER:08d}", saved / "damaged")
    (saved / "damaged" / WEIGHTS).write_bytes((saved / "damaged" / WEIGHTS).read_bytes()[:-100])
    done = start(saved, "again", "--init_from", saved / "damaged").result()
    assert done.returncode == 2 and "damaged" in done.stderr, done.stderr
    assert (older / f"step_{NEWER:08d}").exists() and not (saved / "checkpoints" / "again.1").exists()


def test_no_memory_for_a_copy(saved, run_code):
    """On rank 1 only: it makes no copy, and all ranks wait until what they hold is written."""
    done = run_code("cluster", 2, """
import os
from checkpoints import save as checkpoint
if os.environ["RANK"] == "1":
    checkpoint.free_memory = lambda device: 1000
    checkpoint.Checkpointer.copy_to_host = lambda *_: sys.exit("a copy is made")
""", *words(saved, "short", "--pipelines", "2,2", max_steps=OLDER, save_every=1), then=SCRIPT.name)
    assert done.stdout.count("rank 1: a copy of its part of a checkpoint takes 1 MB") == 1, done.stdout
    ours, theirs = (tensors_of(path / f"step_{OLDER:08d}") for path in (newest(saved, "short").parent, saved / "copy"))
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-10) for name in ours)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, as root")
@pytest.mark.parametrize("room", [1.5, 2.1])
def test_a_full_disk(recorded, saved, tmp_path, room):
    """Room for so many checkpoints: the training goes on, loses no older one, and its end is an error with a remedy."""
    keep, one = int(room), sum(path.stat().st_size for path in (saved / "copy" / f"step_{NEWER:08d}").iterdir())
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={int(one * room)}", "tmpfs", disk], check=True)
    try:
        name = f"full{room}"
        done = start(saved, name, "--pipelines", "2,2", ranks=2, checkpoint_dir=disk, keep=keep).result()
        assert done.returncode == 2 and "make room there" in done.stderr.splitlines()[-1], done.stderr
        assert losses(saved / "runs", name) == pytest.approx(losses(recorded / "runs", "one"), abs=1e-9)
        assert "could not be written" in done.stdout and "No space left on device" in done.stdout
        kept = sorted(path.name for path in (disk / name).iterdir())
        whole = [f"step_{step:08d}" for step in (OLDER, NEWER)[:keep]]
        assert kept == [".lock", "latest", *whole] and (disk / name / "latest").read_text() == f"{whole[-1]}\n"
        assert f"the last one is that of step {int(whole[-1][5:])}" in done.stdout
    finally:
        subprocess.run(["umount", disk], check=True)


def test_unlike_files_on_two_disks(copied, disks):
    """What one disk has of that name is damaged, what the other one has is whole: it counts, whichever comes first."""
    path = copied / f"step_{NEWER:08d}"
    whole = checkpoint_files.read_state(str(path / "state.json"))
    damaged = {**whole, "files": {**whole["files"], "more": {"bytes": 1, "crc32": "0"}}}
    for states, holder in ((damaged, whole), 1), ((whole, damaged), 0):
        both = disks(copied)
        theirs = {**dict.fromkeys(damaged["files"]), "more": "more is missing"}
        both.rank, both.gather = holder, lambda mine: [mine if rank == holder else theirs for rank in (0, 1)]
        found = look_at(str(copied), path.name, both, run_of(whole), list(states))
        assert found.holders == dict.fromkeys(whole["files"], [holder])


class Harmful:
    """What makes a directory when it is unpickled."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_nothing_of_a_checkpoint_is_unpickled(saved, tmp_path):
    """Also where the checksum says that the file is as it was saved."""
    path = shutil.copytree(saved / "copy" / f"step_{NEWER:08d}", tmp_path / f"step_{NEWER:08d}")
    (path / WEIGHTS).write_bytes(pickle.dumps(Harmful(tmp_path / "harm")))
    forge(path, lambda state: {**state, "files": {**state["files"], WEIGHTS: facts_of(str(path / WEIGHTS))}})
    done = start(saved, "pickled", "--resume", path).result()
    assert done.returncode == 2 and "can't be read" in done.stderr, done.stderr
    assert not (tmp_path / "harm").exists()
