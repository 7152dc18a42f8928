"""A debugger on one of the ranks of this process. Its commands come from a text."""

import io
import sys
import time

import pytest
from lab import Edit, Messages, Program, Stop, run, threads
from lab.__main__ import main
from lab.baton import Violation
from lab.thread_ranks import World
from museum.faults import FAULTS

FLAGS = ["--pp_size", "4", "--gradient_accumulation_steps", "4", "--max_tokens", "64"]
SMALL = ["8", "--pp_size", "2", "--num_hidden_layers", "2", "--gradient_accumulation_steps", "1", "--max_tokens", "16"]
RECEIVE = "        i, received = action.microbatch, communication.receive(action)"


@pytest.fixture
def session(capsys):
    """session(commands, where, rank, edits): the run's result and log, and what it prints."""
    def session(commands: str, *where: str, rank=None, edits=()):
        messages, stop = Messages(), Stop(*where, rank=rank, stdin=io.StringIO(commands.replace("; ", "\n") + "\n"))
        result = run(Program("8", FLAGS, edits), threads(4, stop=stop), [messages])
        return result, messages.events, capsys.readouterr().out

    return session


def test_the_first_backward_of_1f1b(session):
    result, events, output = session(
        "ranks; p x.shape; x = None; rank 3; p buffer.shape; p dist.get_rank(); n; up; p action; back; c; p x.shape; b 190, False; ll; "
        "import math; !y = 3; p y, math.pi; interact; print(y + 1)", "backward_microbatch", rank=2)
    unstopped, same_events, _ = session("")
    assert result.rows[0]["loss"] == unstopped.rows[0]["loss"] and events == same_events
    assert "  rank 2                stands\n" in output and "  rank 3 --> rank 2     receive from rank 2" in output
    assert "p dist.get_rank()\n3\n" in output
    assert output.count("\ntorch.Size([1, 16, 128])\n") == 3  # `back` has undone `x = None`
    assert "(rank 3 of 4, to look at) n\n*** rank 3 is only looked at: `rank 2` leads back to yours\n" in output
    assert "microbatch=2)\n" in output and "to look at) back\nback: just before message 17, rank 2: " in output
    assert "190 B" in output and "\n(3, 3.14159265" in output and "\n>>> print(y + 1)\n4\n" in output


def test_back_goes_back_to_the_first_line_and_breakpoints_stay(session):
    commands = "b model.py:86, x.shape[-1] == 9; back; back; back; c; messages; b"
    _, events, output = session(commands, "message:3", rank=0)
    assert [event.number for event in events if event.rank == 0 and event.number][:3] == [1, 2, 3]
    stops = [line.split(",")[0] for line in output.splitlines() if "message " in line]
    assert stops == ["just before message 3", "back: just before message 2", "back: just before message 1",
                     "back: rank 0 has taken part in no message before. This is its first line:",
                     "just before message 3"]
    assert "\n    2  rank 1 -> rank 0  send 1 float32" in output and "    8  " not in output
    assert "stop only if x.shape[-1] == 9" in output


def test_each_rank_stops_in_turn_at_a_breakpoint_of_the_program(session):
    edit = Edit("pipeline_parallel.py", RECEIVE, f"        if k == 1: breakpoint()\n{RECEIVE}")
    _, _, output = session("p k; l; c; p k; c; p k; c; p k; c", edits=[edit])
    assert sorted(line for line in output.splitlines() if line.endswith("p k")) == [
        f"(rank {rank} of 4) p k" for rank in range(4)]
    assert "->\t        if k == 1: breakpoint()" in output  # what `l` shows is the changed text


def test_a_deadlock_ends_in_the_picture(session):
    with pytest.raises(Violation, match="(?s)deadlock.*They wait in a circle: rank 0 -> rank 1 -> rank 0"):
        session("ranks; c", "pipeline_parallel.py:61", rank=3, edits=FAULTS["deadlock"].program().edits)


def test_the_time_limit_does_not_run_while_one_stands_still():
    world = World(1)
    assert world.run(lambda rank: world.ask(lambda: time.sleep(1.5) or 5), timeout=0.2) == [5]


@pytest.mark.parametrize("commands, code, words", [
    ("p 1\n", 0, ""), ("q\n", 1, "error: ended by `q`\n"), (None, 130, "error: interrupted\n")])
def test_how_a_session_ends(monkeypatch, capsys, commands, code, words):
    class Interrupted(io.StringIO):
        def readline(self, *size) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdin", Interrupted() if commands is None else io.StringIO(commands))
    assert main([*SMALL, "--stop", "train.py:150"]) == code
    assert capsys.readouterr().err == words
