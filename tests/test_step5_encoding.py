"""One process of a machine encodes the corpus, however long it takes, and the others find the file."""

import pytest


@pytest.mark.parametrize("step", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_the_others_wait_longer_than_a_collective_may(run_code, tmp_path, step):
    """Encoding a large corpus takes minutes, and NCCL ends a collective after ten of them: here it is three seconds."""
    (tmp_path / "corpus.txt").write_text("We hold these truths to be self-evident. " * 20)
    run_code(step, 3, """
import datetime, time
import torch.distributed as dist
import dataloader
from utils import TINY_LLAMA

encode, encoded = dataloader.encode, []

def slowly(pieces, tokenizer):
    time.sleep(4)
    encoded.append(dist.get_rank())
    return encode(pieces, tokenizer)

dataloader.encode = slowly
dist.init_process_group("gloo")
dist.barrier()  # all ranks have started, however busy the cores are: from now on patience is short
dist.distributed_c10d._set_pg_timeout(patience := datetime.timedelta(seconds=3))
dist.distributed_c10d._get_default_store().set_timeout(patience)
samples = dataloader.load_samples(f"{sys.argv[1]}/corpus.txt", TINY_LLAMA, 8, 1024, 4, f"{sys.argv[1]}/cache")
assert len(samples) == 4 and encoded == [0] * (dist.get_rank() == 0), encoded
dist.destroy_process_group()
""", tmp_path)
