"""Context parallelism: ring attention is whole attention, and its work is balanced.

Losses, norms and every gradient of train.py: test_all_steps_same_math.py. Its messages: test_all_steps_messages.py.
"""

import pytest
from lab.program import Program

context_parallel = Program(15).load().context_parallel

WHOLE_AND_RING = """
import torch
import torch.nn.functional as F
import process_group_manager as pgm
from context_parallel import RingAttention, local_positions

pgm.init_process_group("gloo")
size, dtype, tolerance = int(sys.argv[1]), getattr(torch, sys.argv[2]), float(sys.argv[3])
pgm.setup_process_group_manager(1, 1, 1, size)
B, H, K, T, hd = 2, 4, 2, 24, 8
for layout in ("zigzag", "contiguous"):
    here = local_positions(layout, T)
    for scale in (1, 1e4):  # of the scores: exp(1e4) is no number
        generator = torch.Generator().manual_seed(1)
        q, k, v, grad = (torch.randn(B, heads, T, hd, generator=generator, dtype=dtype) for heads in (H, K, K, H))
        q *= scale / 3
        whole, ring = ([tensor[:, :, places].clone().requires_grad_() for tensor in (q, k, v)]
                       for places in (torch.arange(T), here))
        expected = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        found = RingAttention.apply(layout, *ring)
        expected.backward(grad)
        found.backward(grad[:, :, here])
        assert found.dtype == dtype
        pairs = [(expected, found), *((one.grad, many.grad) for one, many in zip(whole, ring))]
        for (one, many), size in zip(pairs, (scale**0.75, scale**0.75, scale, scale**0.75)):  # as q is
            off = (one[:, :, here] - many).abs().max().item()
            assert many.isfinite().all() and off <= size * tolerance, (layout, scale, off)
"""


@pytest.mark.parametrize("size, dtype, tolerance", [
    (3, "float64", 1e-13), (2, "bfloat16", 5e-2)])
def test_ring_attention_is_whole_attention(run_code, size, dtype, tolerance):
    """Its outputs and all gradients, of grouped queries, in both layouts, with small and with very large scores."""
    run_code(15, size, WHOLE_AND_RING, size, dtype, tolerance)


@pytest.mark.parametrize("layout, efficiency", [("zigzag", 1), ("contiguous", 8 / 15)])
def test_work_of_eight_ranks(layout, efficiency):
    """Pairs of query and key at each hop, for which the slowest rank lets the others wait. Contiguous: P/(2P-1)."""
    size, length, total, slowest = 8, 1024, 0, 0
    for hop in range(size):
        work = []
        for rank in range(size):
            block = context_parallel.visible(layout, rank, (rank - hop) % size, length)
            queries, keys, is_causal = block or (slice(0), slice(0), False)
            pairs = len(range(length)[queries]) * len(range(length)[keys])
            work.append(pairs - length * (length - 1) // 2 if is_causal else pairs)
        if layout == "zigzag":
            assert max(work) == min(work)
        total, slowest = total + sum(work), slowest + max(work)
    assert total == size * length * (size * length + 1) // 2
    assert total / (size * slowest) == pytest.approx(efficiency, rel=0.02)
