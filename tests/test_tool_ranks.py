"""Ranks in one process: what works between processes works there, and what does not ends with a sentence."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from lab.baton import Violation
from lab.program import Edit, Program
from lab.rank_alone import alone
from lab.ranks import processes, run, threads
from lab.thread_ranks import World
from lab.watch.dry_run import DryRun
from lab.watch.held import Memory
from lab.watch.messages import Messages
from lab.watch.numbers import Numbers
from lab.watch.waits import Waits


def violation(size: int, program, timeout: float = 20) -> str:
    with pytest.raises(Violation) as found:
        World(size).run(program, timeout)
    return str(found.value)


def exchange(rank: int, size: int) -> torch.Tensor:
    received = torch.empty(3)
    sending = dist.isend(torch.full((3,), float(rank)), (rank + 1) % size)
    dist.recv(received, (rank - 1) % size)
    sending.wait()
    return received


def test_messages_arrive_and_are_logged():
    world = World(3)
    assert [received[0].item() for received in world.run(lambda rank: exchange(rank, 3))] == [2.0, 0.0, 1.0]
    assert [(event.rank, event.kind, event.peer, event.num_bytes) for event in world.events] == [
        (0, "send", 1, 12), (1, "send", 2, 12), (1, "receive", 0, 12), (2, "send", 0, 12), (2, "receive", 1, 12),
        (0, "receive", 2, 12)]
    assert world.rounds == 1 and world.num_bytes() == 36 and world.num_bytes(1) == 12
    assert dist.isend is not world.isend  # the functions are torch's again


def test_deadlock_shows_who_waits_for_whom():
    def program(rank: int) -> None:
        if rank < 2:
            dist.recv(torch.empty(1), 1 - rank)

    message = violation(3, program)
    assert "rank 0 --> rank 1" in message and "rank 2             has ended" in message
    assert "rank 0 -> rank 1 -> rank 0" in message and f"{dist.recv.__name__}(torch.empty(1), 1 - rank)" in message


@pytest.mark.parametrize("file, shown", [("/tmp/ipykernel_9/8.py", "a cell"), ("/home/x/own.py", "/home/x/own.py")])
def test_a_place_is_the_line_of_a_program_wherever_that_lies(file, shown):
    text = "def program(rank):\n    dist.recv(torch.empty(1), 1 - rank)"
    exec(compile(text, file, "exec"), names := {"dist": dist, "torch": torch})
    assert f" {shown}, line 2" in violation(2, names["program"])


@pytest.mark.parametrize("late", [False, True])
def test_tensor_that_changes_while_it_is_sent(late):
    def program(rank: int) -> None:
        if rank == 0:
            tensor = torch.ones(2)
            sending = dist.isend(tensor, 1)
            if late:  # the other side has posted its receive, but the sender has not waited
                dist.recv(torch.empty(1), 1)
            tensor += 1
            sending.wait()
        else:
            receiving = dist.irecv(torch.empty(2), 0)
            if late:
                dist.send(torch.ones(1), 0)
            receiving.wait()

    assert "rank 0 changed a tensor while it was being sent" in violation(2, program)


def test_nothing_is_there_before_wait():
    def program(rank: int) -> bool:
        if rank == 0:
            dist.send(torch.ones(2), 1)
            return True
        handle = dist.irecv(tensor := torch.zeros(2), 0)
        before = tensor.isnan().all().item()
        handle.wait()
        return before and tensor.tolist() == [1.0, 1.0]

    assert World(2).run(program) == [True, True]


@pytest.mark.parametrize("program, words", [
    (lambda rank: dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(3), 0), "sends 2 numbers"),
    (lambda rank: dist.all_reduce(torch.ones(2 + rank)), "do not match"),
    (lambda rank: dist.all_reduce(torch.ones(2)) if rank else dist.barrier(), "do not match"),
    (lambda rank: dist.isend(torch.ones(2), 1) and None if rank == 0 else None, "were not received"),
    (lambda rank: dist.irecv(torch.ones(2), 1) and None if rank == 0 else None, "has not come"),
    (lambda rank: dist.all_reduce(torch.ones(2), async_op=True) and None if rank == 0 else None, "have left out"),
    (lambda rank: (dist.isend(torch.ones(2), 1), dist.recv(torch.ones(2), 1)) and None if rank == 0 else (
        dist.recv(torch.ones(2), 0), dist.send(torch.ones(2), 0)) and None, "has not waited for what it sends"),
    (lambda rank: dist.all_reduce(torch.ones(2, 3).T), "not contiguous"),
    (lambda rank: dist.send(torch.ones(2), 1, tag=3) if rank == 0 else dist.recv(torch.ones(2), 0), "uses the tag 3"),
    (lambda rank: [dist.new_group(ranks) for ranks in ([0], [1])[:: 1 if rank else -1]] and None, "in the same order"),
    (lambda rank: dist.new_group([0]) and None if rank else None, "unlike numbers of groups"),
    (lambda rank: [dist.new_group(ranks, use_local_synchronization=True) for ranks in ([0], [0, 1])[rank:]] and None,
     "new_group of the ranks [0, 1]"),  # one has another group before it
    (lambda rank: dist.all_reduce(torch.ones(2), group=dist.new_group([0])), "rank 1 is not in the group"),
    (lambda rank: dist.reduce(torch.ones(2), 0), "calls reduce, which"),
    (lambda rank: dist.send(torch.ones(2), rank), "choose another of these ranks"),
    (lambda rank: dist.broadcast(torch.ones(2), 2), "of rank 2 in the group of the ranks [0, 1]: choose one of these"),
])
def test_what_does_not_work_between_processes(program, words):
    assert words in violation(2, program)


def test_rank_that_does_not_end():
    message = violation(2, lambda rank: dist.barrier() or time.sleep(2), timeout=0.5)
    assert "rank 1 does not end. After 0.5 seconds" in message and "time.sleep(2)" in message


def test_errors_are_those_of_the_rank():
    with pytest.raises(ZeroDivisionError) as found:
        World(3).run(lambda rank: dist.barrier() or 1 // (rank - 2))
    assert found.value.rank == 2


@pytest.mark.parametrize("step, size, flags", [
    ("8", 4, ("--pp_size", "2", "--tp_size", "2")), ("15", 2, ("--cp_size", "2"))])
def test_a_step_trains_as_in_processes(step, size, flags):
    """Losses, norms, and each rank's gradients, in every step, which a watch finds here as there."""
    program = Program(step, (*flags, "--gradient_accumulation_steps", "4", "--max_tokens", "128"))
    here = run(program, threads(size), [Numbers()], prepare=lambda modules, rank: setattr(
        modules.train, "load_samples", modules.dataloader.load_samples))
    there = run(program, processes(size), [Numbers()])
    assert len(here.rows) == len(there.rows) == 2
    for one, other in zip(here.rows, there.rows):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-12)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-12)
    found, expected = here.watches[0].gradients, there.watches[0].gradients
    assert found.keys() == expected.keys() == {*range(size)}
    for rank, steps in expected.items():
        torch.testing.assert_close(found[rank], steps, rtol=1e-9, atol=1e-12)


def test_after_an_error_memory_is_no_longer_counted():
    with pytest.raises(ValueError, match="pp_size=9 stages"):
        run(Program("8", ["--pp_size", 9]), alone(0, 9), [memory := Memory()])
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack() and not memory.peak


def test_an_edit_and_an_error_in_processes():
    edits = [Edit("train.py", "        model.zero_grad()\n", "        raise ValueError('edited')\n")]
    with pytest.raises(AssertionError, match="ValueError: edited"):
        run(Program("8", edits=edits), processes(1))
    with pytest.raises(ValueError, match="messages can't watch processes: choose threads"):
        run(Program("8"), processes(1), [Messages()])


def test_a_rank_alone_runs_one_step_and_ends_without_a_group():
    steps, flags = [], ["--dp_size", 128, "--pp_size", 16, "--tp_size", 8, "--num_hidden_layers", 16,
                        "--num_attention_heads", 8, "--num_key_value_heads", 8]

    def note(modules, rank: int) -> None:
        assert (rank, dist.is_initialized(), os.environ["LOCAL_RANK"]) == (8191, False, "7")
        run_schedule = modules.train.run_schedule
        modules.train.run_schedule = lambda *args: steps.append(dist.get_world_size()) or run_schedule(*args)

    [modules] = run(Program("8", flags), alone(8191, 16384), prepare=note).modules
    grid = modules.process_group_manager.process_group_manager
    assert steps == [16384] and (grid.dp_rank, grid.pp_rank, grid.tp_rank) == (63, 15, 7)
    assert not dist.is_initialized() and dist.P2POp.__module__.startswith("torch"), "all is torch's again"
    with pytest.raises(ValueError, match="there is no rank 4 of 4: choose one of 0 to 3"):
        alone(4, 4)


@pytest.mark.parametrize("ranks, watches, words", [
    (alone(0, 2), [Messages()], "messages can't watch alone: choose threads"),
    (threads(2), [DryRun()], "dryrun can't watch threads: choose alone"),
    (threads(2), [Waits()], "waits can't watch threads: choose alone"),
    (alone(0, 2), [Waits(), DryRun()], "dryrun and waits can't watch together: without numbers, nobody waits for them"),
    (alone(0, 2), [Waits()], "call lab.watch.waits.start()")])
def test_watches_that_make_no_sense_are_refused(ranks, watches, words):
    with pytest.raises(ValueError) as found:
        run(Program("8"), ranks, watches)
    assert words in str(found.value) and "\n" not in str(found.value)
