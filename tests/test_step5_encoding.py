"""One process of a machine encodes the corpus, however long it takes, and the others find the file."""

import pytest
from launch import STEPS, fork


@pytest.mark.parametrize("step", [5, pytest.param(8, marks=pytest.mark.slow)])
def test_the_others_wait_longer_than_a_collective_may(tmp_path, step):
    """Encoding a large corpus takes minutes, and NCCL ends a collective after ten of them: here it is one second."""
    (tmp_path / "corpus.txt").write_text("We hold these truths to be self-evident. " * 20)
    script = tmp_path / "script.py"
    script.write_text(f"""
import sys; sys.path.insert(0, {str(STEPS[str(step)])!r})
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
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
samples = dataloader.load_samples({str(tmp_path / "corpus.txt")!r}, TINY_LLAMA, 8, 1024, 4, {str(tmp_path / "cache")!r})
assert len(samples) == 4 and encoded == [0] * (dist.get_rank() == 0), encoded
dist.destroy_process_group()
""")
    fork(step, 3, script=script)
