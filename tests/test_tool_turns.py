"""Programs that take turns: only one of them runs at a time, and none is left running after an error."""

import time

import pytest

from clusters import made_up_cluster
from hosts_bench import Bench
from turns import Program

SCRIPT = """
import os, sys, time
name, path, fails_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
for step in range(1, 5):
    if step == fails_at and os.environ["RANK"] == "1":
        sys.exit("out of luck")
    for _ in range(20):
        with open(path, "a") as file:
            file.write(name)
        time.sleep(0.005)
    if os.environ["RANK"] == "0":
        print("step", step, os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"])
    elif step == fails_at - 1:
        time.sleep(0.3)  # until the turn is over
"""


@pytest.fixture
def make_program(tmp_path):
    programs = []

    def make(name: str, fails_at: int = 0) -> Program:
        (tmp_path / "script.py").write_text(SCRIPT)
        programs.append(Program(name, 2, tmp_path / "script.py", name, tmp_path / "log", fails_at, OMP_NUM_THREADS="3"))
        return programs[-1]

    yield make
    for program in programs:
        program.kill()


def test_only_one_runs_at_a_time(make_program, tmp_path):
    log = tmp_path / "log"
    log.touch()
    programs = [make_program(name) for name in "ab"]
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
