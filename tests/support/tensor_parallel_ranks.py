"""The sums and the vocabulary-parallel loss on the ranks of one tp group, each against one process in float64.

`tensor_parallel_ranks.py STEP`, as N ranks. An AssertionError on any rank fails the run.
"""

import pathlib
import sys
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path[:0] = [str(next(pathlib.Path(__file__).parents[2].glob(f"step{sys.argv[1]}_*")))]
import process_group_manager as pgm  # noqa: E402
import tensor_parallel  # noqa: E402
from tensor_parallel import all_reduce, cross_entropy, split_over_tp  # noqa: E402

MIB = 1 << 20


def large_logits(vocab_size: int) -> list[torch.Tensor]:
    """(B, T, V) each, float32: up to 1e4 of either sign, all near 1e4, and all near -1e4."""
    noise = torch.randn(2, 6, vocab_size, generator=torch.Generator().manual_seed(3))
    return [1e4 * noise.clamp(-1, 1), 1e4 + noise, noise - 1e4]


def check_loss(vocab_size: int) -> None:
    targets = torch.randint(vocab_size, (2, 6), generator=torch.Generator().manual_seed(4))
    for logits in large_logits(vocab_size):
        whole = logits.double().requires_grad_()
        expected = F.cross_entropy(whole.flatten(0, 1), targets.flatten())
        expected.backward()
        part = split_over_tp(logits, -1).clone().requires_grad_()
        loss = cross_entropy(part, targets, vocab_size)
        loss.backward()
        assert abs(loss.item() - expected.item()) <= 1e-6 * expected.item(), (loss, expected)
        off = (part.grad - split_over_tp(whole.grad, -1)).abs().max()
        assert off <= 1e-6, off  # not where it is a NaN


def check_sum(nbytes: int, dtype: torch.dtype, op: dist.ReduceOp) -> None:
    """The sum has the same bits on all ranks, and one large message is one all-reduce of gloo's."""
    size, n, rank = nbytes // dtype.itemsize, dist.get_world_size(), dist.get_rank()
    everyone = [torch.randn(size, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(n)]
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as of_gloo:
        all_reduce(result := everyone[rank].clone(), op)
    assert of_gloo.call_count == (nbytes > MIB or n == 3), (nbytes, of_gloo.call_count)
    results = [torch.empty_like(result) for _ in range(n)]
    dist.all_gather(results, result)
    assert all(torch.equal(results[0], other) for other in results), (nbytes, dtype)
    exact = torch.stack(everyone).double()
    if op == dist.ReduceOp.MAX:
        assert torch.equal(result.double(), exact.amax(0))
    else:
        assert ((result - exact.sum(0)).abs() <= n * torch.finfo(dtype).eps * exact.abs().sum(0)).all(), (nbytes, dtype)


def check_embedding(vocab_size: int) -> None:
    """What the ranks send is in the dtype of the activations, and their sum is the cast of the whole lookup."""
    torch.manual_seed(5)
    whole = torch.nn.Embedding(vocab_size, 8)
    ids = torch.randint(vocab_size, (2, 6))
    with mock.patch.object(tensor_parallel, "all_reduce", wraps=all_reduce) as sums:
        found = tensor_parallel.VocabParallelEmbedding(whole, torch.bfloat16)(ids)
    assert sums.call_args.args[0].dtype == torch.bfloat16
    assert torch.equal(found, whole(ids).to(torch.bfloat16))


if __name__ == "__main__":
    pgm.init_process_group("gloo")
    pgm.setup_process_group_manager(1, 1, dist.get_world_size())
    check_loss(vocab_size=48)
    check_loss(vocab_size=50)  # uneven parts
    check_embedding(vocab_size=50)
    for nbytes in (12, MIB, MIB + 4):
        check_sum(nbytes, torch.float32, dist.ReduceOp.SUM)
    check_sum(2 * MIB, torch.bfloat16, dist.ReduceOp.SUM)
    check_sum(2 * MIB, torch.float32, dist.ReduceOp.MAX)
    dist.destroy_process_group()
