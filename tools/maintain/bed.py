"""The test bed tools/testbed.sh from Python: three hosts node0, node1 and node2 on this machine."""

import fcntl
import os
import pathlib
import subprocess
import tempfile

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "testbed.sh"
NODES = ["node0", "node1", "node2"]
SHOWN = dict(line.split("=", 1) for line in
             subprocess.run([SCRIPT, "show"], capture_output=True, text=True).stdout.splitlines())
NAME, NETWORK, SSH_CONFIG, DISKS = (SHOWN.get(key, "0") for key in ("name", "network", "ssh_config", "disks"))


def testbed(*args, check: bool = True, timeout: float = 60, **options) -> subprocess.CompletedProcess:
    """Runs `tools/testbed.sh args`, e.g. testbed("exec", "node1", "hostname"), and returns it with its output as text.

    With `check` an exit code other than zero is an AssertionError that shows the output. `options`: subprocess.run's.
    """
    command = [SCRIPT, *map(str, args)]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    done = subprocess.run(command, check=False, timeout=timeout, **{**pipes, **options})
    assert not check or done.returncode == 0, f"{args}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


testbed.__test__ = False  # its name begins like that of a test


def start(node: str, *command, **options) -> subprocess.Popen:
    """Starts `command` on `node` and doesn't wait for it. Killing the process that it returns kills the command."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([SCRIPT, "exec", node, *map(str, command)], **{**pipes, **options})


def on_disk(node: str, path: pathlib.Path) -> pathlib.Path:
    """Where this machine sees what is at `path` on the host's own disk."""
    return pathlib.Path(DISKS, node, *path.parts[1:])


def processes() -> set[str]:
    """The ids of all processes in the hosts."""
    return {pid for node in NODES
            for pid in subprocess.check_output(["ip", "netns", "pids", f"{NAME}-{node}"], text=True).split()}


@pytest.fixture(scope="module")
def bed():
    """Three fresh hosts for the tests of a module; skips them where this machine can't have any (no root, say).

    There is one bed: another process that runs tests of another module waits until it is down.
    """
    with open(f"{tempfile.gettempdir()}/{NAME}.{os.getuid()}", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in ("down", "up"):
            done = testbed(command, check=False)
            if done.returncode == 2:
                pytest.skip(done.stderr.strip())
            assert done.returncode == 0, done.stderr
        yield
        testbed("down")
