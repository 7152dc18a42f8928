"""A run that has trained to its end ends with exit code 0, whatever threads are still doing in C++."""

import subprocess

import pytest
from lab.launch import STEPS, environment, torchrun

SCRIPT = """
import contextlib, sys, threading, time
sys.path.insert(0, {step!r})
import torch, torch.distributed as dist
from process_group_manager import init_process_group
from utils import one_clear_error

def main():
    init_process_group("gloo")
    message = torch.zeros(1)
    if dist.get_rank() == 0:
        time.sleep({delay})
        with contextlib.suppress(RuntimeError):  # rank 1 may be gone
            dist.send(message, 1)
    else:  # a thread that comes back from C++ while this process ends
        threading.Thread(target=dist.irecv(message, 0).wait, daemon=True).start()
        print("trained", flush=False)

if __name__ == "__main__":
    with one_clear_error():
        main()
"""


@pytest.mark.slow(drawn=1)
@pytest.mark.parametrize("delay", [0.05, 0.1, 0.2, 0.3])
def test_no_thread_aborts_the_end(tmp_path, delay):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(step=str(STEPS["2"]), delay=delay))
    done = subprocess.run(torchrun(2, script), env=environment(), text=True, capture_output=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "trained\n", done.stderr
