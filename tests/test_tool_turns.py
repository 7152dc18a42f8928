"""Programs that take turns: only one of them runs at a time."""

import time

import pytest

from clusters import made_up_cluster
from hosts_bench import Bench
from turns import Program

SCRIPT = """
import os, sys, time
name, path = sys.argv[1:]
for step in range(1, 5):
    for _ in range(20):
        with open(path, "a") as file:
            file.write(name)
        time.sleep(0.005)
    if os.environ["RANK"] == "0":
        print("step", step, os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"])
"""


def test_only_one_runs_at_a_time(tmp_path):
    log, script = tmp_path / "log", tmp_path / "script.py"
    log.touch()
    script.write_text(SCRIPT)
    programs = [Program(name, 2, script, name, log, OMP_NUM_THREADS="3") for name in "ab"]
    for program in programs:
        program.turn()
    time.sleep(0.1)  # the rank that prints nothing may write once more before the signal arrives
    for program in programs * 2:
        written = len(log.read_text())
        assert 0 < program.turn() < 5
        time.sleep(0.1)
        assert set(log.read_text()[written:]) == {program.name}
    for program in programs:
        program.end()
        assert program.last_lines[-1] == "step 4 2 3\n"
    assert log.read_text().count("a") == log.read_text().count("b") == 2 * 4 * 20


def test_a_plan_that_one_has_written_is_predicted_as_plan_py_does():
    bench = object.__new__(Bench)
    bench.cluster = made_up_cluster([4, 2, 1])
    slow, fast = (bench.predict(1, *pipelines)["predicted"]["step_seconds"] for pipelines in (
        [((2,), (8,), 8)], [((0,), (8,), 8)]))
    assert slow == pytest.approx(4 * fast, rel=0.05)
