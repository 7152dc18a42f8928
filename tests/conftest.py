"""For all tests: one thread a process, no Hub, no proxy; and marks that select the tests of a step or a room.

    pytest                                  what a change has to pass, without root: minutes
    pytest -m step4 --all-cases             all tests of step 4, the slow ones too
    pytest -m "slow or hosts or tools"      what the first leaves out
    pytest --all-cases                      all cases of the tables of which a run draws some; DRAW=17 repeats a draw
"""

import fcntl
import gc
import os
import pathlib
import random
import re
import shutil
import sys
import tempfile
from collections import Counter, defaultdict

import pytest
from host_facts import available_memory, usable_cores
from lab.launch import ROOT, STEPS, environment, fork, fork_server

pytest.register_assert_rewrite("support.recordings", "support.families")  # so that their asserts show what they compared

ROOMS = (  # file name -> mark
    (r"test_(step\d+)_", r"\1"),
    (r"test_(cluster)_", r"\1"),
    (r"test_(tool)_", r"\1s"),
)
WORKER_BYTES = 5e9
NEED_LINUX = r"test_cluster_((elastic_)?launch|limits)\b"  # files that start what a host runs, which is Linux


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="all cases of the tables of which a run draws some")


def pytest_xdist_auto_num_workers() -> int:
    """Without -n: a process for each core, at least two and at most eight, and no more than memory has room for.

    With the ranks of 0.5 GB that a test starts, up to eight of them, it takes up to WORKER_BYTES.
    """
    return max(2, int(min(8, usable_cores(), available_memory() / WORKER_BYTES)))


def pytest_configure(config: pytest.Config) -> None:
    """Before a test module imports torch, which reads OMP_NUM_THREADS at that time.

    What runs keep for later ones, encoded text and the Hub's files, is kept for these tests alone.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:  # its processes inherit the folder
        kept = tempfile.TemporaryDirectory()
        config.add_cleanup(kept.cleanup)
        os.environ["XDG_CACHE_HOME"] = os.environ["MPLCONFIGDIR"] = kept.name
    variables = environment(DRAW=os.environ.get("DRAW", str(random.randrange(1000))))
    os.environ.clear()
    os.environ.update(variables)


OURS = []  # warnings that lines of this repository have caused
SECONDS = Counter()  # file -> processor seconds of its tests and of the processes whose end they waited for


def processor_seconds() -> float:
    """Of this process and of those whose end was waited for: by itself, and by what fork() has started, on Linux."""
    seconds = sum(os.times()[:4])
    if fork_server.cache_info().currsize and (stat := pathlib.Path(f"/proc/{fork_server().process.pid}/stat")).is_file():
        seconds += sum(map(int, stat.read_text().rpartition(")")[2].split()[11:15])) / os.sysconf("SC_CLK_TCK")
    return seconds


def pytest_warning_recorded(warning_message) -> None:
    path = pathlib.Path(warning_message.filename)
    if path.is_relative_to(ROOT) and "site-packages" not in path.parts:
        OURS.append(f"{path}:{warning_message.lineno}: {warning_message.message}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item):
    before = processor_seconds()
    result = yield
    SECONDS[item.path.name] += processor_seconds() - before
    return result


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:
    SECONDS.update(getattr(node, "workeroutput", {}).get("seconds", {}))  # a process that was killed has left none


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A warning of our own is an error."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["seconds"] = dict(SECONDS)
    if OURS and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter) -> None:
    """Processor time does not grow with what else the machine does, as the seconds of --durations do."""
    if dearest := [f"{count:.0f} {name}" for name, count in SECONDS.most_common(10) if count >= 1]:
        terminalreporter.write_line(f"processor seconds: {sum(SECONDS.values()):.0f} in all; {', '.join(dearest)}")
    for text in OURS:
        terminalreporter.write_line(f"a warning of our own: {text}", red=True)


def pytest_report_header() -> str:
    return f"cases are drawn with DRAW={os.environ['DRAW']}"


def not_drawn(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of a test's cases that are marked drawn(n), or slow(drawn=n), all but n at most. The shares of a table, which
    chance has dealt once and for all, take turns: as many draws in a row as there are shares have every case."""
    tables, left_out = defaultdict(list), set()
    for item in items:
        drawn, slow = map(item.get_closest_marker, ("drawn", "slow"))
        if count := drawn.args[0] if drawn else slow and slow.kwargs.get("drawn"):
            tables[item.function, count, drawn is None].append(item)
    for (_, count, _), cases in tables.items():
        shares = -(-len(cases) // count)
        dealt = random.Random(0).sample(cases, len(cases))
        left_out.update(set(cases).difference(dealt[int(os.environ["DRAW"]) % shares :: shares]))
    return left_out


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks each test with its file's room, and with the step that it is parametrised with, if any.

    Of tables of which a run draws some cases, -m commands and -k run all.
    """
    if not (config.option.all_cases or config.option.keyword or "commands" in config.option.markexpr):
        left_out = not_drawn(items)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=[*left_out])
    for item in items:
        for pattern, mark in ROOMS:
            if match := re.match(pattern, item.path.name):
                item.add_marker(match.expand(mark))
        if sys.platform != "linux" and re.match(NEED_LINUX, item.path.name):
            item.add_marker(pytest.mark.skip(reason="hosts run Linux"))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        step = getattr(params.get("case"), "step", params.get("step"))
        if step is not None:
            item.add_marker(f"step{step}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported to collect the tests stays until the end: the garbage collector need not look at it any more."""
    gc.freeze()


@pytest.fixture(scope="module")
def selected(request):
    """selected(name): what the tests of this module that are to run have for the parameter `name`, each value once.

    For fixtures that start many runs at the same time, and none that no test asks for.
    """
    def selected(name: str) -> list:
        items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
        return list(dict.fromkeys(item.callspec.params[name] for item in items if name in item.callspec.params))

    return selected


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> pathlib.Path:
    """A folder with the models and the corpus of recordings.py, in which runs may leave what they record."""
    from support import recordings  # and with it torch, which comes after pytest_configure

    folder = tmp_path_factory.mktemp("models")
    recordings.write_models(folder)
    return folder


@pytest.fixture(scope="session")
def recorded() -> pathlib.Path:
    """The folder of record() in checkpoint_runs.py, made once for all processes of these tests, which only read it."""
    from support import checkpoint_runs

    folder = pathlib.Path(os.environ["XDG_CACHE_HOME"], "recorded")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "whole").exists():
            shutil.rmtree(folder, ignore_errors=True)  # what an error has left
            checkpoint_runs.record(folder)
            (folder / "whole").touch()
    return folder


@pytest.fixture(scope="session")
def tools(tmp_path_factory) -> pathlib.Path:
    """The folder of make_tools() in tools/maintain/launcher.py."""
    from maintain.launcher import make_tools

    return make_tools(tmp_path_factory.mktemp("tools"))


@pytest.fixture
def parsed(monkeypatch):
    """parsed(module, words): what parse_args() of a script makes of these words."""
    def parsed(module, words: str = ""):
        monkeypatch.setattr(sys, "argv", ["script.py", *words.split()])
        return module.parse_args()

    return parsed


@pytest.fixture
def run_code(tmp_path):
    """run_code(room, ranks, code, *words, **options): fork() for a program that stands in a test.

    It can import the modules of its `room`, a step or "cluster". With `then`, a script of that room, the script runs
    after it in the same process, with `words` as its flags; without, they are sys.argv[1:].
    """
    def run_code(room, ranks: int, code: str, *words, then=None, **options):
        path = ROOT / "cluster" if room == "cluster" else STEPS[str(room)]
        head = f"import sys\nsys.path[0] = {str(path)!r}\n" + "from ranks import course\n" * (room == "cluster")
        if then:
            code += f"\nimport runpy\nsys.argv[0] = {str(path / then)!r}\n"
            code += "runpy.run_path(sys.argv[0], run_name='__main__')\n"
        program = tmp_path / f"program{len(list(tmp_path.iterdir()))}.py"
        program.write_text(head + code)
        return fork(9 if room == "cluster" else room, ranks, *words, script=program, **options)

    return run_code


@pytest.fixture(scope="module")
def world_of_one():
    """torch.distributed with one rank, for the tests of a module."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def command(tmp_path):
    """command(words, **env): starts a command, which is killed at the end of the test if it still runs. See Command."""
    from maintain.processes import Command

    started = []

    def command(words, **env):
        started.append(Command(words, tmp_path, **env))
        return started[-1]

    yield command
    for each in started:
        each.kill()
