"""Ranks of an elastic run that watch each other: who is lost, who is only slow, and what those that are left write."""

import itertools
import os
import socket
import threading
import time
import types

import pytest
import torch
from launch import modules_of
from safetensors.torch import load_file

with modules_of(9):
    import train_distributed
    from checkpoints import save as checkpoint, survive


def test_a_lost_rank_is_waited_for_without_the_lock(monkeypatch):
    """On a GPU: what the queue has before a change of the weights may never end, and must not keep them from being
    written; the change itself is done when the lock is given back."""
    watch, seen = object.__new__(survive.Watch), []
    watch.store, watch.lock = object(), threading.Lock()
    stream = types.SimpleNamespace(synchronize=lambda: seen.append(("waits", watch.lock.locked())))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    with watch.changing_weights():
        seen.append(("changes", watch.lock.locked()))
    assert seen == [("waits", False), ("changes", True), ("waits", True)] and not watch.lock.locked()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU's queue is what it is about")
def test_a_survivor_does_not_wait_for_the_gpu(monkeypatch, tmp_path):
    """What it holds is written while the GPU is busy, as with a collective that waits for the lost rank."""
    ours, held = object.__new__(checkpoint.Checkpointer), torch.ones(1000, device="cuda")
    ours.folder, ours.written, ours.tp_group, ours.stream = str(tmp_path), 4, None, torch.cuda.Stream()
    ours.grid, ours.stems = types.SimpleNamespace(dp_rank=0, pp_rank=0, tp_rank=0), {"model": "m", "optimizer": "o"}
    ours.stage, ours.optimizer, ours.state = types.SimpleNamespace(model=torch.nn.Linear(1, 1)), None, lambda step: {}
    pieces = {kind: [checkpoint.Piece(kind, held, None, 1)] for kind in checkpoint.KINDS}
    monkeypatch.setattr(checkpoint, "pieces_of", lambda stage, optimizer: pieces)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000_000)  # clock cycles: some ten seconds
    held.fill_(2.0)  # queued behind
    said = ours.save_survivor(5)
    is_busy = not torch.cuda.current_stream().query()
    assert is_busy and said == f"what it holds is in {tmp_path / 'step_00000005.survivors'}"
    assert (load_file(tmp_path / "step_00000005.survivors" / "m-p0s0.safetensors")["model"] == 1).all()


def test_a_survivor_that_saves_nothing_says_why(monkeypatch, capsys):
    watch, codes = object.__new__(survive.Watch), []
    watch.rank, watch.lock, watch.ended = 1, threading.RLock(), threading.Event()
    watch.rescue = lambda: os.listdir("nowhere")
    monkeypatch.setattr(os, "_exit", codes.append)
    watch.fail("rank 2 is silent")
    assert codes == [1] and capsys.readouterr().out.splitlines() == [
        "rank 1: rank 2 is silent",
        "rank 1: what it holds could not be written (FileNotFoundError(2, 'No such file or directory'))"]


def test_a_silent_rank_whose_machine_answers_is_not_lost(monkeypatch):
    """A board that swaps counts no further, and its system still answers for it. A killed process has no door."""
    monkeypatch.setattr(survive, "BEAT", 0.01)
    monkeypatch.setattr(survive, "PATIENCE", 0.03)
    watch, door, looks, failed = object.__new__(survive.Watch), socket.create_server(("", 0)), itertools.count(), []
    watch.rank, watch.world_size, watch.ended, watch.rescue = 0, 2, threading.Event(), None
    watch.noted, _ = os.pipe()
    watch.door = socket.create_server(("", 0))
    watch.door.setblocking(False)
    watch.doors = [("home", "127.0.0.1", door.getsockname()[1]), ("pi", "127.0.0.1", door.getsockname()[1])]

    def multi_get(keys) -> list[bytes]:
        if (look := next(looks)) == 20:  # the machine with the store swaps as well
            raise RuntimeError("wait timeout")
        if look == 40:
            assert not failed
            door.close()
        if failed or look > 400:
            watch.ended.set()
        return [str(look).encode(), b"7"]  # rank 1 stands still

    watch.store = store = types.SimpleNamespace(add=lambda *_: None, multi_get=multi_get)
    watch.connect = lambda: store
    watch.fail = failed.append
    watch.run()
    assert failed and set(failed) == {"rank 1 on pi is silent"} and 40 < next(looks) < 60


def test_a_slow_rank_answers_as_often_as_it_is_looked_for(monkeypatch):
    """The system keeps 128 who look; a rank that never let them in would then count as lost."""
    monkeypatch.setattr(survive, "BEAT", 0.01)
    watch = object.__new__(survive.Watch)
    watch.rank, watch.world_size, watch.ended, watch.rescue = 0, 1, threading.Event(), None
    watch.noted, _ = os.pipe()
    watch.door = socket.create_server(("127.0.0.1", 0))
    watch.door.setblocking(False)
    watch.store = types.SimpleNamespace(add=lambda *_: None, multi_get=lambda keys: [b"-1"])
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        for _ in range(300):
            socket.create_connection(watch.door.getsockname(), timeout=2).close()
            time.sleep(0.002)
    finally:
        watch.ended.set()
        thread.join()


def test_an_elastic_run_waits_as_long_for_a_slow_machine(monkeypatch):
    """Loading, measuring and evaluating take a board minutes; that a rank is lost, others notice without a time-out."""
    waits = []
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "100")
    monkeypatch.setattr(train_distributed.pgm, "init_process_group", lambda backend, seconds=600: waits.append(seconds))
    monkeypatch.setattr(train_distributed, "print_banner", lambda *_: None)
    train_distributed.join(types.SimpleNamespace(device="cpu", dtype="auto", omp_num_threads=None, lora_rank=None))
    assert waits == [600]
