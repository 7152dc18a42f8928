"""Cross-entropy over a large vocabulary, without the copies of the logits that autograd would keep.

With V = 49,152 words, the logits of 512 tokens are 25 million numbers: 50 MB in bfloat16. The usual way makes three
more arrays of that many float32 numbers: the logits, their log-softmax, and its gradient. Here rows are taken a few at
a time. Forward keeps the logarithm of each row's sum of exponentials, and backward computes from it what the gradient
of the logits is, softmax - 1 at the target, once more. In float32 and float64 the numbers are those of torch.
"""

import torch

NUMBERS = 1 << 22  # of logits at a time


class CrossEntropy(torch.autograd.Function):
    """Mean over N rows of logits (N, V) with their targets (N,), in float32 or more."""

    @staticmethod
    def forward(ctx, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        count, log_sums = max(1, NUMBERS // logits.shape[1]), []
        total = torch.zeros((), dtype=dtype, device=logits.device)
        for rows, wanted in zip(logits.split(count), targets.split(count)):
            rows = rows.to(dtype)
            log_sums.append(rows.logsumexp(-1))  # (count,)
            total += (log_sums[-1] - rows.gather(-1, wanted[:, None])[:, 0]).sum()
        ctx.save_for_backward(logits, targets, torch.cat(log_sums))
        return total / len(targets)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits, targets, log_sums = ctx.saved_tensors
        out, scale, count = torch.empty_like(logits), grad / len(targets), max(1, NUMBERS // logits.shape[1])
        for rows, wanted, log_sum, result in zip(*(each.split(count) for each in (logits, targets, log_sums, out))):
            softmax = rows.to(log_sum.dtype, copy=True).sub_(log_sum[:, None]).exp_()
            softmax.scatter_add_(-1, wanted[:, None], softmax.new_full((len(wanted), 1), -1.0))
            result.copy_(softmax.mul_(scale))
        return out, None


def has_router_loss(config) -> bool:
    """Whether the loss is another one where a step's samples are cut into other micro-batches: of a mixture of experts.
    """
    return bool(getattr(config, "output_router_logits", False))


def mean_cross_entropy(output, batch: dict[str, torch.Tensor], router_loss_coef: float = 0) -> torch.Tensor:
    """As run_common.mean_cross_entropy, for language models: of next tokens, (B, T, V) and (B, T)."""
    loss = CrossEntropy.apply(output.logits.flatten(0, -2), batch["target_ids"].flatten())
    router_loss = getattr(output, "aux_loss", None)
    return loss if router_loss is None else loss + router_loss_coef * router_loss
