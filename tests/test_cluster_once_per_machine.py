"""once_per_machine: one process works, however long it takes, and all get the result."""

from launch import ROOT, fork


def test_the_others_wait_longer_than_a_collective_may(tmp_path):
    """Encoding a large corpus takes minutes, and NCCL ends a collective after ten of them: here it is one second."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys; sys.path.insert(0, {str(ROOT / 'cluster')!r})" + """
import datetime, os, time
import course
import torch.distributed as dist
from machine_facts import once_per_machine
from utils import UserError

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
made = []

def make():
    time.sleep(2.5)
    made.append(os.environ["RANK"])
    return "tokens"

def fail():
    raise UserError("no such corpus")

assert once_per_machine(make) == "tokens" and made == ["0"] * (dist.get_rank() == 0)
try:
    once_per_machine(fail)
    raise SystemExit("no error")
except UserError as error:
    assert str(error) == "no such corpus"
assert once_per_machine(lambda: dist.get_rank()) == 0, "a third call has its own result"
dist.destroy_process_group()
""")
    fork(9, 2, script=script)
