"""What survivors hold: a step is made by all or by none, and state moves from any layout to any other in memory."""

import contextlib
import gc
import pathlib
import signal
import types
import weakref

import pytest
from lab.launch import fork, modules_of

with modules_of(9):
    from hosts import exits
    from run import generation, live_state, session
    from utils import UserError


def test_three_ranks_hold_one_training_together():
    """Over gloo; what each rank checks stands in support/held_ranks.py."""
    done = fork(9, 3, script=pathlib.Path(__file__).parent / "support" / "held_ranks.py")
    assert len([line for line in done.stdout.splitlines() if line.startswith("rank ")]) == 3 * 4, done.stdout


def test_adapters_and_what_they_are_beside():
    """A weight that an adapter has been put beside keeps its key; the adapters have theirs, and move by themselves."""
    stage = types.SimpleNamespace(tied=None)
    assert live_state.key_of(stage, "layers.0.base_layer.weight", "", 0) == ("layers.0.weight", "", 0)
    assert live_state.key_of(stage, "layers.0.lora_a", "exp_avg", 1) == ("layers.0.lora_a", "exp_avg", 1)


def test_what_a_generation_has_made_goes_with_it():
    """The buckets with their gradients, too, while its weights are still held, and a checkpoint can be described."""
    class Plugin:
        global_batch_size, unfinished = 8, None

    it, stage = object.__new__(session.Session), types.SimpleNamespace(model=types.SimpleNamespace(parameters=list))
    it.trained = session.Trained(Plugin(), None, None, None)
    plugin = weakref.ref(it.trained.plugin)
    it.sampler, it.step, it.commit, it.tp_rank, it.everything = None, 3, None, 0, frozenset()
    it.args, it.generation = types.SimpleNamespace(max_grad_norm=1.0, local_steps=None), types.SimpleNamespace(number=1)
    it.checkpointer = types.SimpleNamespace(stage=stage, optimizer=None, scheduler=None, describe=it.describe)
    held = live_state.LiveState(it)
    gc.collect()
    assert plugin() is None and held.checkpointer.describe.__self__ is it


@pytest.mark.parametrize("held, step, expected", [
    (True, 4, "goes on"),  # another process has no room, say
    (True, 5, UserError),  # it came of the training
    (False, 4, exits.OF_THIS_MACHINE)])  # it has just come, and nobody needs it
def test_what_a_process_without_room_for_records_ends(monkeypatch, capsys, held, step, expected):
    """Records are made when the session has begun, so what is held is in there."""
    members = types.SimpleNamespace(contacts=types.SimpleNamespace(found_running=not held))
    it = generation.Generation(members, None, held=object() if held else None)
    it.begin(types.SimpleNamespace(step=step, start=types.SimpleNamespace(origin=types.SimpleNamespace(step=4))))
    monkeypatch.setattr(it, "leave", lambda error: "goes on")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError) if expected is UserError else contextlib.nullcontext():
        assert it.outlives(UserError("rank 1: can't write runs: No space left on device")) == expected
    assert expected is UserError or "No space left on device" in capsys.readouterr().out


def test_a_torch_that_has_changed(run_code):
    """Names that torch never promised to keep are gone: one error, of which all ranks hear in another way."""
    done = run_code("cluster", 2, """
import torch.distributed as dist
import process_group_manager as pgm
from ranks.collectives import wait_for_all
from ranks.errors import one_error_of_all
pgm.init_process_group("gloo")
del dist.distributed_c10d._get_default_store
with one_error_of_all(""):
    wait_for_all("here")
""", check=False, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("error: torch no longer has what is used of it") == 1, done.stderr
    assert "_get_default_store" in done.stderr and "pip install -c constraints.txt torch" in done.stderr
    held = types.SimpleNamespace(checkpointer=types.SimpleNamespace(stage=types.SimpleNamespace(
        model=types.SimpleNamespace(parameters=lambda: [object()]))))
    with pytest.raises(ValueError, match="torch no longer has .* attribute '_post_accumulate_grad_hooks'"):
        live_state.LiveState(held)


def test_an_error_does_not_wait_for_a_checkpoint_that_others_hold_up(run_code):
    done = run_code("cluster", 1, """
import threading, time
from ranks.errors import one_error_of_all
from run import generation
from utils import UserError
generation.JOINING = 0.2
threading.Thread(target=time.sleep, args=[100], name=generation.WRITER).start()
with one_error_of_all(""), generation.end_of_elastic_run():
    raise UserError("no such flag")
""", check=False, timeout=20)
    assert done.returncode == 2 and done.stderr.splitlines()[-1] == "error: no such flag", done


@pytest.mark.parametrize("written, says", [(5, "goes on from there"), (4, "goes on after step 4"),
                                           (0, "begins anew, as no step was saved")])
def test_a_stop_says_what_is_saved(monkeypatch, capsys, written, says):
    """The disk may have been full at the last step, or always: then the end is an error."""
    it = object.__new__(session.Session)
    it.step, it.generation = 5, types.SimpleNamespace(failure_detector=None, members=None)
    it.start = types.SimpleNamespace(disks=types.SimpleNamespace(group=None), folder="runs")
    it.checkpointer = types.SimpleNamespace(wait=lambda: None, written=written)
    barrier = types.SimpleNamespace(wait=lambda timeout: None)
    monkeypatch.setattr(session, "dist", types.SimpleNamespace(get_rank=lambda: 0, barrier=lambda *_, **__: barrier))
    if written < 5:
        with pytest.raises(ValueError, match=f"that of step 5, could not be written to runs: make room.*{says}"):
            it.finish(True)
        return
    assert it.leave(signal.SIGTERM, it.finish(True)) == 143
    assert capsys.readouterr().out == f"stopped after step 5, as it was told: --resume auto {says}\n"
