"""One process of a machine encodes the corpus, however long it takes, and the others find the file."""


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
[samples] = dataloader.load_samples(f"{sys.argv[1]}/corpus.txt", TINY_LLAMA, 8, 1024, 4, f"{sys.argv[1]}/cache")
assert len(samples) == 4 and encoded == [0] * (dist.get_rank() == 0), encoded
dist.destroy_process_group()
""", tmp_path)


def test_where_the_encoding_process_is_killed_all_who_wait_end(run_code, tmp_path):
    """Ranks 1 and 2 are another machine, and rank 1 is killed there while it encodes: the others do not wait. Each rank
    is a child of its own, whose end nobody tells the others."""
    (tmp_path / "corpus.txt").write_text("We hold these truths to be self-evident. " * 20)
    run_code(5, 3, """
import os, signal, time
import torch.distributed as dist
import dataloader
from utils import TINY_LLAMA

folder, rank = sys.argv[1], int(os.environ["RANK"])
if child := os.fork():
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.exit(code != [1, -signal.SIGKILL, 1][rank] and f"rank {rank} ended with {code}")
os.environ["LOCAL_RANK"] = str(int(rank == 2))
encode = dataloader.encode

def encode_or_die(pieces, tokenizer):
    if rank == 1:
        time.sleep(0.5)  # meanwhile the others have begun to wait
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(pieces, tokenizer)

dataloader.encode = encode_or_die
dist.init_process_group("gloo")
dataloader.load_samples(f"{folder}/corpus.txt", TINY_LLAMA, 8, 1024, 4, f"{folder}/cache{int(rank > 0)}")
""", tmp_path)
