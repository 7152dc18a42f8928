"""break_it.py: each fault shows its symptom, and DEBUGGING.md's way to find it finds it."""

import pathlib
import re
import shlex

import break_it
from break_it import FAULTS
from lab.launch import ROOT, STEPS, start_fork
from test_pages import missing_paths

PAGE = (ROOT / "docs" / "DEBUGGING.md").read_text(encoding="utf-8")
SMALL = ["--num_hidden_layers", "2", "--seq_len", "16", "--micro_batch_size", "1", "--max_tokens"]
TWO_STEPS = [*SMALL, "256"]  # of 8 micro-batches, over all replicas


def start(folder: pathlib.Path, name: str, *further: str, **options):
    """The run of break_it.py, in forked processes that start faster, as a future; metrics in folder/NAME."""
    fault = FAULTS[name]
    program = fault.program(*further)
    flags = [*break_it.flags_of(name, fault, list(further)), "--log_dir", folder]
    script = program.copy(folder / f"{name}{len(list(folder.iterdir()))}")
    return start_fork(fault.step, program.size, *flags, script=script, timeout=60, **options)


def test_list_and_wrong_words(capsys):
    assert break_it.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FAULTS)
    for words, message in (
        (["hnag"], "there is no fault 'hnag': choose one of hang, drift,"),
        (["stale", "--check", "bytes"], "--check bytes is not one of numbers, bytes, messages, schedule, types, with"),
        ([], "choose one of hang, drift,"),
        (["stale", "--find", "--sgd"], "--find chooses the check itself: leave --sgd out"),
        (["--find", "--", "--timeout", "20"], "--find trains a small model and chooses its flags: leave --timeout 20"),
    ):
        assert break_it.main(words) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"break_it.py: {message}") and error.count("\n") == 1


def test_a_fault_of_a_small_trainer_is_listed_and_found_but_not_run(monkeypatch, capsys):
    monkeypatch.setitem(FAULTS, "f", FAULTS["partial"]._replace(name="f", where="trainer tp"))
    assert break_it.main(["f"]) == 2 and break_it.main(["--list"]) == 0
    shown = capsys.readouterr()
    assert shown.err == "break_it.py: f is a fault of trainer tp, not of a step: try f --find\n"
    assert re.search("^f +trainer tp: f does nothing", shown.out, re.M)


def test_timeouts_name_the_lines(tmp_path):
    """hang: the ranks wait in unlike all-reduces. deadlock: both stages wait in receive. The first to fail ends all."""
    runs = [start(tmp_path, name, *TWO_STEPS, "--timeout", "3", check=False) for name in ("hang", "deadlock")]
    for run, where in zip(runs, ("in (all_reduce_loss_across_dp_ranks|log)\n", "in receive\n")):
        done = run.result()
        assert done.returncode == 1 and "step 1/" not in done.stdout
        assert "Timed out waiting 3000ms" in done.stderr and re.search(where, done.stderr), done.stderr


def test_the_page_shows_commands_that_exist():
    commands = [line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.S | re.M)
                for line in block.splitlines() if "break_it.py" in line]
    for line in commands:
        words = shlex.split(line.partition(" # ")[0])
        break_it.parse_args(words[words.index("tools/break_it.py") + 1 :])
    walked = "hang drift seed scale deadlock order sizes stale each norms buffer".split()
    assert all(any(f"break_it.py {name}" in line for line in commands) for name in walked)
    assert not missing_paths(PAGE, ROOT / "docs")


def test_the_stacks_of_the_page_are_those_of_its_steps():
    """A frame's line is the one that calls the frame above it: `hang` is a fault of step 5, `deadlock` of step 8."""
    frames, called = re.findall(r"^    ([\w.<>]+) \((\w+\.py):(\d+)\)", PAGE, re.M), "all_reduce"
    assert len(frames) == 8
    for name, file, number in frames:
        step, called = ("8", "wait") if name.endswith(".receive") else ("5", called)
        line = (STEPS[step] / file).read_text().splitlines()[int(number) - 1]
        assert f"{called.rpartition('.')[2]}(" in line, (name, file, number, line)
        called = "all_reduce" if name == "<module>" else name
