"""What survivors hold: a step is made by all or by none, and state moves from any layout to any other in memory."""

import pathlib

import pytest
from lab.launch import fork
from support.checkpoint_runs import flags_of, write_corpus, write_model


def test_three_ranks_hold_one_training_together(tmp_path):
    """Over gloo; what each rank checks stands in support/held_ranks.py."""
    done = fork(9, 3, tmp_path, script=pathlib.Path(__file__).parent / "support" / "held_ranks.py")
    no_room = "rank 1: can't write runs: No space left on device"
    assert len([line for line in done.stdout.splitlines() if line.startswith("done: ")]) == 3 * 5, done.stdout
    assert done.stdout.count(f"this generation can't begin ({no_room}): the run goes on with those that can") == 1
    assert done.stdout.count(f"error: {no_room}\n") == 3, done.stdout


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


@pytest.mark.parametrize("written, says", [(4, "goes on after step 4"), (0, "begins anew, as no step was saved")])
def test_a_run_whose_last_checkpoint_finds_no_room(run_code, tmp_path, written, says):
    """The disk may have been full at the last step, or always: the end is an error."""
    write_corpus(tmp_path)
    words = flags_of(tmp_path, "full", write_model(tmp_path / "model"), max_steps=5, save_every=2)
    done = run_code("cluster", 1, f"""
import errno
from checkpoints import save
write_state = save.write_state
def write(path, state):
    if state["step"] > {written}:
        raise OSError(errno.ENOSPC, "No space left on device", path)
    write_state(path, state)
save.write_state = write
""", *words, then="train_distributed.py", check=False)
    said = f"error: the last checkpoint, that of step 5, could not be written to {tmp_path}/checkpoints/full: make room "
    assert done.returncode == 2 and said in done.stderr and done.stderr.endswith(f"--resume auto then {says}\n"), done
