"""One process of a machine encodes the corpus, however long it takes, and the others find the file."""

import signal

from launch import STEPS
from processes import run_apart


def test_the_others_wait_longer_than_a_collective_may(run_code, tmp_path):
    """Encoding a large corpus takes minutes, and NCCL ends a collective after ten of them: here, 1.5 s."""
    (tmp_path / "corpus.txt").write_text("We hold these truths to be self-evident. " * 20)
    run_code(5, 3, """
import datetime, time
import torch.distributed as dist
import dataloader
from utils import TINY_LLAMA

encode, encoded = dataloader.encode, []

def slowly(pieces, tokenizer):
    time.sleep(2.5)
    encoded.append(dist.get_rank())
    return encode(pieces, tokenizer)

dataloader.encode = slowly
dist.init_process_group("gloo")
dist.barrier()  # all ranks have started, however busy the cores are: from now on patience is short
dist.distributed_c10d._set_pg_timeout(patience := datetime.timedelta(seconds=1.5))
dist.distributed_c10d._get_default_store().set_timeout(patience)
samples = dataloader.load_samples(f"{sys.argv[1]}/corpus.txt", TINY_LLAMA, 8, 1024, 4, f"{sys.argv[1]}/cache")
assert len(samples) == 4 and encoded == [0] * (dist.get_rank() == 0), encoded
dist.destroy_process_group()
""", tmp_path)


def test_where_the_encoding_process_is_killed_all_who_wait_end(tmp_path):
    """Ranks 1 and 2 are another machine, and rank 1 is killed there while it encodes: the others do not wait."""
    (tmp_path / "corpus.txt").write_text("We hold these truths to be self-evident. " * 20)
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(STEPS["5"])!r})
import os, signal, time
import torch.distributed as dist
import dataloader
from utils import TINY_LLAMA

encode = dataloader.encode

def encode_or_die(pieces, tokenizer):
    if dist.get_rank() == 1:
        time.sleep(1)  # meanwhile the others have begun to wait
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(pieces, tokenizer)

dataloader.encode = encode_or_die
dist.init_process_group("gloo")
cache = {str(tmp_path)!r} + os.environ["GROUP_RANK"]
dataloader.load_samples({str(tmp_path / "corpus.txt")!r}, TINY_LLAMA, 8, 1024, 4, cache)
""")
    places = [("0", "0"), ("1", "0"), ("1", "1")]  # machine, rank there
    ended = run_apart(script, [{"GROUP_RANK": machine, "LOCAL_RANK": rank} for machine, rank in places])
    assert [code for code, _ in ended] == [1, -signal.SIGKILL, 1], ended
