"""Step 4: tensor parallelism."""

import torch
import torch.nn.functional as F

from attempt import random
from catalogue import exercise


def check_contiguous(attempt, tensor_parallel) -> None:
    """From now on, all_reduce refuses a tensor that is not contiguous, as the backends do."""
    all_reduce = tensor_parallel.all_reduce

    def checked(tensor: torch.Tensor, *op) -> None:
        attempt.require(tensor.is_contiguous(), f"all_reduce is given a tensor of shape {list(tensor.shape)} whose "
                        "numbers do not lie one behind the other (is_contiguous() is False): make it contiguous first")
        all_reduce(tensor, *op)

    tensor_parallel.all_reduce = checked


@exercise("4", "tensor_parallel.Copy", hints=(
    "forward has nothing to compute: it returns x, or by convention x.view_as(x), another tensor with its numbers.",
    "backward gets dY and returns dX: the sum of all ranks' gradients.",
    "all_reduce works in place: clone the gradient first, with memory_format=torch.contiguous_format."), wrong=[
    ("partial", "the gradient of the input"),
    ("the gradient is summed in place", "grad = grad.clone(memory_format=torch.contiguous_format)",
     "grad = grad.contiguous()", "Autograd may use it elsewhere"),
    ("the copy has the strides of the gradient", "grad.clone(memory_format=torch.contiguous_format)", "grad.clone()",
     "is_contiguous()"),
    ("only the first row's gradient", "        return grad\n", "        return grad[0]\n",
     "what backward returns has shape [3], but has to have [2, 3]")])
def f(attempt):
    """Write f, which stands in front of column-parallel layers.

    x is the same on all tp ranks. Each of them goes on with a part of the matrix, so in backward each has only its own
    term of the gradient with respect to x, and all need the sum:

        forward     x ------ f -----> x
        backward    sum <--- f <----- this rank's term

    A torch.autograd.Function computes in `forward(ctx, ...)` and gets in `backward(ctx, grad)` the gradient with
    respect to its output. It returns that with respect to its input. You may call all_reduce(tensor), which sums over
    the tp group, in place, and returns nothing; the tensor has to be contiguous. Autograd may use the tensor `grad`
    elsewhere, so it must stay as it is. grad.clone(memory_format=torch.contiguous_format) is a copy that is contiguous,
    while clone() alone keeps the order in memory. `ctx` is not needed here.
    """
    for dp, tp in ((1, 2), (2, 2), (1, 3)):
        def program(modules, rank):
            attempt.grid(modules, dp=dp, tp=tp)
            check_contiguous(attempt, modules.tensor_parallel)
            x, grad = random(2, 3).requires_grad_(), random(2, 3, seed=1 + rank)
            copy = attempt.checked(modules.tensor_parallel.Copy)
            y = copy.apply(x * 1)
            y.backward(grad)
            z = random(2, 3).requires_grad_()
            (copy.apply(z).t() * random(3, 2, seed=1 + rank)).sum().backward()  # strides (1, 2)
            return {"the output": y, "the gradient of the input": x.grad, "the gradient of a transposed output": z.grad}

        attempt.both(dp * tp, program, f"dp {dp} x tp {tp}")


@exercise("4", "tensor_parallel.Reduce", hints=(
    "forward calls all_reduce and returns the result.",
    "The derivative of a sum with respect to each of its terms is 1: backward returns the gradient as it is.",
    "If forward changes x itself, ctx.mark_dirty(x) says so to autograd. Or change a copy."), wrong=[
    ("double", "the gradient of this rank's term"),
    ("nothing is summed", "        all_reduce(x)\n", "", "the output"),
    ("the mean instead of the sum", "        return x\n",
     "        x /= pgm.process_group_manager.tp_world_size\n        return x\n", "(1/2 of it)"),
    ("the given gradient is cleared", "        return grad\n",
     "        own = grad.clone()\n        grad.zero_()\n        return own\n", "backward changes the tensor")])
def g(attempt):
    """Write g, which stands behind row-parallel layers.

    x is a partial sum on each tp rank. The output is the sum of all of them, and everything behind g is computed by all
    tp ranks alike. So each rank gets the same gradient with respect to the sum:

        forward     this rank's term ------ g -----> sum
        backward    ?                <----- g <----- the gradient with respect to the sum

    A torch.autograd.Function computes in `forward(ctx, ...)` and gets in `backward(ctx, grad)` the gradient with
    respect to its output. It returns that with respect to its input, which is this rank's term. You may call
    all_reduce(tensor), which sums over the tp group, in place, and returns nothing. Where forward changes its own
    input, it has to tell autograd by ctx.mark_dirty(x), and return x itself; or it works on a copy.
    """
    for dp, tp in ((1, 2), (2, 2), (1, 3)):
        def program(modules, rank):
            attempt.grid(modules, dp=dp, tp=tp)
            term = random(2, 3, seed=1 + rank).requires_grad_()
            hidden = term * 2
            y = attempt.checked(modules.tensor_parallel.Reduce).apply(hidden)
            attempt.require(y is hidden or torch.equal(hidden, term * 2), f"rank {rank}: forward changes its input x, "
                            "and autograd does not know: ctx.mark_dirty(x), and return x itself")
            y.backward(random(2, 3))
            return {"the output": y, "the gradient of this rank's term": term.grad / 2}

        attempt.both(dp * tp, program, f"dp {dp} x tp {tp}")


def check_cross_entropy(attempt) -> None:
    """The loss of some tokens and its gradient with respect to each rank's logits, against those of one process."""
    for size, vocab_size, scale, count in ((2, 6, 1.0, 4), (3, 7, 1.0, 3), (4, 8, 1000.0, 4)):
        logits, targets = scale * random(count, vocab_size), torch.tensor([0, vocab_size - 1, 2, 1][:count])

        def program(modules, rank):
            attempt.grid(modules, tp=size)
            mine = logits.tensor_split(size, dim=-1)[rank].clone().requires_grad_()
            given = mine * 1
            loss = modules.tensor_parallel.VocabParallelCrossEntropy.apply(given, targets.clone(), vocab_size)
            attempt.require(torch.equal(given, mine), f"rank {rank}: forward changes the logits, which autograd may "
                            "need: make a new tensor")
            (3 * loss).backward()
            return float(loss.detach()), mine.grad

        whole = logits.clone().requires_grad_()
        expected = F.cross_entropy(whole, targets)
        (3 * expected).backward()
        grads = whole.grad.tensor_split(size, dim=-1)
        situation = f"{count} tokens, a vocabulary of {vocab_size}, {size} ranks, logits up to {logits.max():.0f}"
        for rank, (loss, grad) in enumerate(attempt.run(size, program)[0]):
            attempt.same(loss, expected.item(), f"the loss of {situation}", rank)
            attempt.same(grad, grads[rank], f"the gradient of 3 * loss with respect to its logits, {situation}", rank)


@exercise("4", "tensor_parallel.VocabParallelCrossEntropy.forward", hints=(
    "First the largest logit of each token: logits.amax(dim=-1), then all_reduce(..., dist.ReduceOp.MAX). Subtract it.",
    "The target's logit is there on one rank only: gather at local_ids, and masked_fill(elsewhere, 0.0).",
    "Stack the sums of exp and the target's logits, all_reduce(both), and the loss is (sum_exp.log() - target_logit)"
    ".mean(). The softmax that backward needs is exp / sum_exp."), wrong=[
    ("each rank subtracts its own largest logit", "all_reduce(largest, dist.ReduceOp.MAX)", "pass",
     "the loss of 4 tokens"),
    ("nothing is subtracted", "logits = logits - largest.unsqueeze(-1)", "logits = logits.clone()", "logits up to 2"),
    ("other ranks count column 0 as the target", ".squeeze(-1).masked_fill(elsewhere, 0.0)", ".squeeze(-1)",
     "the loss of 4 tokens"),
    ("4 tokens always", ".mean()", ".sum() / 4", "the loss of 3 tokens"),
    ("the logits are changed", "logits = logits - largest.unsqueeze(-1)", "logits = logits.sub_(largest.unsqueeze(-1))",
     "forward changes the logits")])
def vocab_parallel_cross_entropy(attempt):
    """Compute the loss from logits that are split along the vocabulary.

    Each tp rank has the logits (N, V/tp) of N tokens for its part of the vocabulary, and all have the targets (N,),
    which are ids of the whole vocabulary. Return the mean of log(sum_v exp(z_v)) - z_target over the tokens, on all
    ranks. No rank may need the logits of the others, and exp must not overflow, however large a logit is:

        rank 0   logits [1, 3]     largest 3     sum of exp(z - 3) = 1.135     z_target - 3 = 0 (it is elsewhere)
        rank 1   logits [2, 0]                                       0.418                    2 - 3 = -1
        together                         3                           1.553                   -1     loss 1.440

    You may call all_reduce(tensor, dist.ReduceOp.MAX) and all_reduce(tensor), which work in place, and

        local_ids, elsewhere = to_local_ids(target_ids, vocab_size)

    both (N,): the column of each target in this rank's logits (0 if it is elsewhere), and whether it is elsewhere. The
    backward is written already. For it, call ctx.save_for_backward(softmax, local_ids, elsewhere), with this rank's
    part (N, V/tp) of the softmax over the whole vocabulary.
    """
    check_cross_entropy(attempt)


@exercise("4", "tensor_parallel.clip_grad_norm", hints=(
    "Sum up squares, not norms: the norm of all is the root of the sum of the squares.",
    "A parameter in `split` counts on every rank. One that is not split has the same gradient on all, so only tp rank "
    "0 counts it.",
    "all_reduce(squares), then squares.sqrt(). Clip by torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm) if "
    "max_norm is not 0."),
    blank=("is_first = ", "rows = ", "squares = ", "all_reduce(squares", "if max_norm", "return "), wrong=[
    ("counted", "the gradient norm with tp_size 2"),
    ("each rank has the norm of its part", "all_reduce(squares)", "pass", "the gradient norm with tp_size 2"),
    ("norms are summed instead of squares", "get_total_norm(rows) ** 2\n", "get_total_norm(rows)\n",
     "the gradient norm with tp_size 2")])
def norm_over_tp(attempt):
    """Compute the gradient norm of a model that is split over the tp ranks, and clip.

    The norm is the root of the sum of the squares of all gradients of the whole model. `params` are the parameters that
    this rank has, with their gradients in param.grad, and `split` is the set of those that are only a part:

        in `split`           rank 0 has rows 0 to 255, rank 1 rows 256 to 511, ...    the matrices
        not in `split`       all ranks have the whole, with the same gradient         the weights of the norms

    Return the norm before clipping, a tensor with one number that is the same on all tp ranks. If max_norm is not 0 and
    the norm is larger, multiply all gradients by max_norm / norm, in place. max_norm = 0 means: do not clip.

    You may call all_reduce(tensor), which sums a contiguous tensor over the tp group, in place, and
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, norm), which clips. grid = pgm.process_group_manager has
    grid.tp_rank.
    """
    flags = "--max_tokens 16 --gradient_accumulation_steps 1 --num_hidden_layers 1 --max_grad_norm"
    whole = attempt.train(1, f"{flags} 0", ours=True).rows[0]["grad_norm"]
    for size in (2, 4):
        for max_norm in (0, 0.5, 1000):
            got, expected = (attempt.train(size, f"{flags} {max_norm} --tp_size {size}", ours)
                             for ours in (False, True))
            situation = f"with tp_size {size} and max_grad_norm {max_norm}"
            attempt.same(got.rows[0]["grad_norm"], whole, f"the gradient norm {situation}")
            for rank in range(size):
                attempt.same(got.gradients[rank][0], expected.gradients[rank][0],
                             f"the gradients that the optimizer gets, {situation}", rank, tolerance=1e-5)


@exercise("4", "tensor_parallel.all_reduce", hints=(
    "In each round, exchange with one partner, and add: `dist.isend`, `dist.recv`, then wait for the send.",
    "The partner at distance d (1, 2, 4, ...) is tp_rank ^ d: the rank whose number differs in one bit.",
    "Combine with torch.add or torch.maximum, with out=tensor: the sum is needed in place."),
    blank=("received = ", "for distance"), wrong=[
    ("the partner is the next rank", "grid.tp_rank ^ distance", "(grid.tp_rank + distance) % grid.tp_world_size",
     "deadlock"),
    ("crossed", "circle"),
    ("the maximum is forgotten", "torch.add if op == dist.ReduceOp.SUM else torch.maximum", "torch.add", "the maximum"),
    ("distances for 8 ranks", "(1, 2, 4, 8)[", "(1, 2, 4)[", "tp 16, the sum")])
def recursive_doubling(attempt):
    """Sum a tensor over the tp ranks in log2(n) rounds instead of 2 (n - 1).

    All ranks exchange their value with a partner at distance 1 and add, then with one at distance 2, then 4. So tp
    ranks 0 and 1 are partners, and 2 and 3; then 0 and 2, and 1 and 3. The results have to be equal to the last bit:

        rank      0     1     2     3
        start     a     b     c     d
        d = 1    a+b   a+b   c+d   c+d
        d = 2     a+b+c+d on each

    `tensor` has to hold the result, and `op` is dist.ReduceOp.SUM or MAX. You may call
    dist.isend(tensor, group=grid.tp_group, group_dst=partner), which returns a handle to wait() for, and
    dist.recv(tensor, group=grid.tp_group, group_src=partner), whose partner is a tp rank. grid.tp_rank is that of this
    rank, and grid.tp_world_size their number n.
    """
    # After k rounds a rank can know the values of at most 2^k ranks, so no way has fewer than log2(n) rounds.
    for dp, size in ((1, 2), (2, 2), (1, 4), (1, 16), (1, 8)):
        def program(modules, rank):
            attempt.grid(modules, dp=dp, tp=size)
            one, two = random(3, seed=rank), torch.arange(3.0) * (-1) ** rank
            modules.tensor_parallel.all_reduce(one)
            modules.tensor_parallel.all_reduce(two, modules.tensor_parallel.dist.ReduceOp.MAX)
            return {"the sum": one, "the maximum": two}

        world = attempt.both(dp * size, program, f"dp {dp} x tp {size}")
        attempt.messages_only(world)
        sums = [each["the sum"] for each in attempt.run(dp * size, program)[0]][:size]
        attempt.require(all(torch.equal(each, sums[0]) for each in sums), f"tp {size}: the sums of the ranks differ in "
                        "their last bits, because they have added in different orders")
    attempt.score("rounds of two all-reduces over 8 ranks", world.rounds, 6)
