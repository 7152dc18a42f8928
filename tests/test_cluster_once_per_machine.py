"""One process of a machine, or one machine of all, works, however long it takes, and all get the result."""

import json

from lab.launch import ROOT

PAIRS = [json.dumps({"prompt": f"{i} ", "completion": f"number {i}"}) + "\n" for i in range(40)]
RANK_2_IS_ANOTHER_HOST = """
import argparse, os, pathlib, socket
import torch.distributed as dist
import process_group_manager as pgm
from data import encoded
from utils import UserError

folder, tokenizer, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
is_another = rank == 2
if is_another:  # where the run was started
    os.environ["LAUNCH_CLUSTER_HOME"] = "1"
pgm.init_process_group("gloo")
if is_another:
    socket.gethostname = lambda: "another"
encoded.CACHE = str(folder / ("cache of rank 2" if is_another else "cache"))
"""


def test_the_others_wait_longer_than_a_collective_may(run_code):
    """Encoding a large corpus takes minutes, and NCCL ends a collective after ten of them: here it is one second."""
    run_code("cluster", 2, """
import datetime, os, time
import torch.distributed as dist
from ranks.collectives import once
from ranks.placement import machine_rank
from utils import UserError

dist.init_process_group("gloo")
dist.barrier()  # all ranks have started, however busy the cores are: from now on patience is short
dist.distributed_c10d._set_pg_timeout(patience := datetime.timedelta(seconds=1))
dist.distributed_c10d._get_default_store().set_timeout(patience)
made = []

def make():
    time.sleep(1.5)
    made.append(os.environ["RANK"])
    return "tokens"

def fail():
    raise UserError("no such corpus")

assert once(machine_rank(), make) == "tokens" and made == ["0"] * (dist.get_rank() == 0)
try:
    once(machine_rank(), fail)
    raise SystemExit("no error")
except UserError as error:
    assert str(error) == "no such corpus"
assert once(machine_rank(), dist.get_rank) == 0 and once(1, dist.get_rank) == 1, "a third call has its own result"
dist.destroy_process_group()
""")


def test_where_another_machines_process_is_killed_all_who_wait_end(run_code):
    """Each rank is a child of its own, whose end nobody tells the other."""
    run_code("cluster", 2, """
import os, signal, socket, time
import torch.distributed as dist
from ranks.collectives import once
from ranks.placement import machine_rank

rank = int(os.environ["RANK"])
if child := os.fork():
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code != [1, -signal.SIGKILL][rank] and f"rank {rank} ended with {code}")
dist.init_process_group("gloo")
socket.gethostname = lambda: f"host{rank}"

def make():
    if rank == 1:
        time.sleep(0.5)  # meanwhile the other machine has begun to wait
        os.kill(os.getpid(), signal.SIGKILL)

once(machine_rank(), make)
""")


def test_machines_without_the_data_are_sent_them(run_code, tmp_path):
    """Ranks 0 and 1 share a disk. Rank 2, where the run was started, has another: it alone has the data, a tokenizer."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "data.jsonl").write_text("".join(PAIRS))
    run_code("cluster", 3, RANK_2_IS_ANOTHER_HOST + """
if is_another:
    os.chdir(folder / "home")
args = argparse.Namespace(dataset_name="data.jsonl", seq_len=16)

def load():
    name = tokenizer if is_another else "none"
    return [row.tolist() for row in encoded.load_samples(args, name, 1024, packing="auto")]

everyone = [None] * 3
dist.all_gather_object(everyone, load())
assert len(everyone[0]) == 40 and everyone[0] == everyone[1] == everyone[2]
encoded.Disks.send = lambda *words: sys.exit("what is there is sent again")
if rank == 0:
    encoded.SENT.clear()  # as in a process that has just started
assert load() == everyone[0]
os.chdir("/")  # the host that has them is lost, and comes back without: others have what they were sent
assert load() == everyone[0]
encoded.SENT.clear()
try:
    sys.exit(load())
except UserError as error:
    assert "there is no such path (/data.jsonl)" in str(error), error
dist.destroy_process_group()
""", tmp_path, ROOT / "assets" / "tiny_llama")
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("cache", "cache of rank 2")]
    assert files[0] == files[1] and len(files[0]) == 1 and files[0][0].endswith(".rows")


def test_machines_with_unlike_data_are_told(run_code, tmp_path):
    """Rank 2 is on another host, whose data lack a row."""
    (tmp_path / "data.jsonl").write_text("".join(PAIRS))
    (tmp_path / "one less.jsonl").write_text("".join(PAIRS[:-1]))
    run_code("cluster", 3, RANK_2_IS_ANOTHER_HOST + """
args = argparse.Namespace(dataset_name=str(folder / "data.jsonl"), seq_len=16)
assert len(encoded.load_samples(args, tokenizer, 1024, packing="auto")) == 40
args.dataset_name = str(folder / "one less.jsonl") if is_another else args.dataset_name
try:
    sys.exit(encoded.load_samples(args, tokenizer, 1024, packing="auto"))
except UserError as error:
    assert "is not the same on all machines: another (rank 2) would read" in str(error), error
dist.destroy_process_group()
""", tmp_path, ROOT / "assets" / "tiny_llama")
