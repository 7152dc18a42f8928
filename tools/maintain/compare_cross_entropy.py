"""Why step 4's cross-entropy works on split logits: against gathering them. `torchrun --nproc_per_node 4 THIS_FILE`

Both do forward and backward on the same logits of 4 x 128 tokens; the two take turns, medians of 15 rounds.
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "step4_tensor_parallel"))
import process_group_manager as pgm  # noqa: E402
from tensor_parallel import cross_entropy  # noqa: E402


class Gather(torch.autograd.Function):
    """All ranks' parts side by side; backward keeps this rank's part of the gradient."""

    @staticmethod
    def forward(ctx, logits):
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, logits)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous()


def gathered(logits, target_ids, vocab_size):
    return torch.nn.functional.cross_entropy(Gather.apply(logits).flatten(0, 1), target_ids.flatten())


def main():
    dist.init_process_group("gloo")
    pgm.setup_process_group_manager(dp_size=1, pp_size=1, tp_size=dist.get_world_size())
    for vocab_size in (1024, 32000):
        full = torch.randn(4, 128, vocab_size, generator=torch.Generator().manual_seed(0))
        target_ids = torch.arange(512).view(4, 128) % vocab_size
        logits = full.chunk(dist.get_world_size(), dim=-1)[dist.get_rank()].contiguous().requires_grad_()
        seconds, results = {cross_entropy: [], gathered: []}, {}
        for _ in range(15):
            for loss_function in seconds:
                dist.barrier()
                start = time.perf_counter()
                loss = loss_function(logits, target_ids, vocab_size)
                (grad,) = torch.autograd.grad(loss, logits)
                seconds[loss_function].append(time.perf_counter() - start)
                results[loss_function] = loss.item(), grad
        (a, grad_a), (b, grad_b) = results.values()
        assert abs(a - b) < 1e-5 and torch.allclose(grad_a, grad_b, atol=1e-7), "the two disagree"
        if dist.get_rank() == 0:
            split, whole = (statistics.median(times) * 1e3 for times in seconds.values())
            ratio = f"{whole / split:.1f}x"
            print(f"vocabulary {vocab_size}: split {split:.1f} ms, gathered {whole:.1f} ms, {ratio}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    main()
