"""Backward in two parts, so that a stage can do the second one when it would otherwise wait (Qi et al. 2023).

Backward of y = x W^T receives dy, the gradient of y, and computes two matrix products of equal size:

    B   dx = dy W      the gradient of the input: the stage before waits for it
    W   dW = dy^T x    the gradient of the weight: nobody needs it before the optimizer step

divide_backward() replaces model.linear, through which all matrix products with weights go. After postpone(True),
autograd computes dx only and puts (weight, dy, x) in a list. The pipeline keeps this list for each micro-batch, and
adds up dW when the schedule says so. What is not a matrix product with a weight (attention, norms, the embedding, the
loss) belongs to B. With --recompute, x is the one that B has computed again, so only what W needs is kept after B.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import model as llama
from utils import UserError

Postponed = list[tuple[nn.Parameter, torch.Tensor, torch.Tensor]]  # weight (out, in), dy (..., out), x (..., in)
postponed: Postponed | None = None  # since the last take()


def postpone(enabled: bool) -> None:
    """Whether backward leaves the gradients of linear layers' weights to add_weight_gradients from now on."""
    global postponed
    postponed = [] if enabled else None


def divide_backward(args) -> None:
    """From now on the model's matrix products are those of this module. Raises UserError where they are compiled."""
    if args.pp_size > 1 and args.pp_engine.endswith("zb") and args.compile:
        raise UserError(f"--pp_engine {args.pp_engine} divides backward, but --compile leaves it in one piece: leave "
                        "--compile out, or use another --pp_engine")
    llama.linear = linear


def linear(x: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    """x W^T in the dtype of x: (..., in), (out, in) -> (..., out), as model.linear computes it."""
    copy = llama.cast(weight, x.dtype)
    if postponed is None:
        return F.linear(x, copy)
    return LinearInTwoParts.apply(x, copy.detach(), (weight,))


class LinearInTwoParts(torch.autograd.Function):
    """y = x W^T, whose backward computes dx and postpones dW. `copy` is the weight in the dtype of x.

    The weight itself comes in a tuple, so that autograd takes it for no input and does not run its hooks for dx.
    """

    @staticmethod
    def forward(ctx, x, copy, weight):  # (..., in), (out, in), one (out, in) -> (..., out)
        (ctx.weight,) = weight
        ctx.save_for_backward(x, copy)
        return F.linear(x, copy)

    @staticmethod
    def backward(ctx, grad):
        x, copy = ctx.saved_tensors
        postponed.append((ctx.weight, grad, x.detach()))
        return grad @ copy, None, None


def take() -> Postponed | None:
    """What was postponed since the last call. None after postpone(False)."""
    taken = postponed
    postpone(taken is not None)
    return taken


@torch.no_grad()
def add_weight_gradients(entries: Postponed, model: nn.Module) -> None:
    """Adds dW to the gradient of each weight, and tells the DataParallelBucket `model`, as backward's hook would do."""
    while entries:  # each is given up at once
        weight, grad, x = entries.pop(0)
        grad, x = grad.flatten(0, -2).t(), x.flatten(0, -2)  # dW = grad @ x: (out, N) (N, in)
        if weight.grad is None:
            weight.grad = (grad @ x).to(weight.dtype)
        elif weight.dtype == x.dtype:
            weight.grad.addmm_(grad, x)  # product and sum in one pass over the gradient
        else:
            weight.grad += grad @ x
        if weight in model.bucket_of:
            model.mark_param_as_ready(weight)
