"""Step 1: the parts of a Llama."""

import types

import torch

from attempt import random
from catalogue import exercise
from lab.program import Program


@exercise("1", "model.Attention.forward", hints=(
    "F.scaled_dot_product_attention(q, k, v, is_causal=True) needs as many key/value heads as query heads. Which "
    "key/value head does query head 0 read, which query head 1?",
    "H/K consecutive query heads share a key/value head: repeat_interleave(H // K, dim=1), not repeat.",
    "The heads (B, H, T, hd) have to become one vector of a token: transpose(1, 2), then reshape, then out_proj."),
    blank=("is_grouped = q", "if is_grouped", "out = ", "return "), wrong=[
    ("the block of heads is repeated as a whole", "is_grouped = q.size(1) != k.size(1)",
     "k, v = (heads.repeat(1, q.size(1) // k.size(1), 1, 1) for heads in (k, v))\n    is_grouped = False",
     "query head 1"),
    ("tokens read from later ones", "is_causal=True", "is_causal=False", "must not read from later"),
    ("heads and tokens are not exchanged", "out.transpose(1, 2).reshape", "out.reshape", "in each other's place"),
    ("the keys are detached", "out = F.scaled_dot_product_attention(q, k, v,",
     "out = F.scaled_dot_product_attention(q, k.detach(), v,", "the gradient of k_proj.weight is None"),
    ("the scale of heads of 4", "is_causal=True,", "is_causal=True, scale=0.5,", "heads of 6, 3 tokens, query head 0"),
    ("nothing goes through out_proj", "self.out_proj(out.transpose(1, 2).reshape(batch, seq_len, -1))",
     "out.transpose(1, 2).reshape(batch, seq_len, -1)", "the gradient of out_proj.weight is None")])
def grouped_query_attention(attempt):
    """Let the query heads read from the key/value heads that they share.

    The queries, keys and values are there, already rotated: q (B, H, T, hd), k and v (B, K, T, hd). K divides H, and
    H/K consecutive query heads share one key/value head. Each token reads from itself and from earlier tokens:

        query heads      0   1   2   3   4   5   6   7         score(i, j) = q_i . k_j / sqrt(hd)   for j <= i
        read from        [ 0 ]   [ 1 ]   [ 2 ]   [ 3 ]         out_i = sum over j of softmax_j(score(i, j)) * v_j
        key/value head                                         (H = 8, K = 4)

    Return what self.out_proj makes of the heads' outputs: it is a linear layer from H hd to D, and expects the vectors
    of all heads of a token one behind the other, (B, T, H hd). You may write the softmax yourself, or call
    F.scaled_dot_product_attention(q, k, v, is_causal=True), which wants equally many heads of all three.
    """
    for heads, shared, size, seq_len in ((2, 2, 4, 5), (6, 2, 6, 3), (4, 1, 2, 7), (8, 4, 4, 5)):
        config = types.SimpleNamespace(hidden_size=heads * size, num_attention_heads=heads, head_dim=size,
                                       num_key_value_heads=shared)

        def program(modules, rank):
            attention = modules.model.Attention(config).double()
            for i, projection in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
                projection.weight.data = random(*projection.weight.shape, seed=i) / 2
            attention.out_proj.weight.data = torch.eye(heads * size, dtype=torch.float64)  # so heads can be told apart
            x = random(2, seq_len, heads * size, seed=3).requires_grad_()
            angles = modules.model.get_cos_sin(seq_len, size, x.dtype, x.device, rope_theta=10000.0)
            out, later = attention(x, *angles), x.detach().clone()
            later[:, -1] += 1
            changed = attention(later, *angles)
            attempt.require(isinstance(out, torch.Tensor) and out.shape == x.shape,
                            f"it has to return a tensor of shape (B, T, D) = {list(x.shape)}")
            attempt.require(torch.equal(out[:, :-1], changed[:, :-1]), "the outputs of earlier tokens change with the "
                            "last token.\n  A token must not read from later ones, and the dimensions of heads and "
                            "tokens must not\n  be in each other's place when the heads become one vector.")
            attempt.require(out.requires_grad, "autograd can't follow what computes the output from x")
            out.backward(random(*out.shape, seed=4))
            gradients = {f"the gradient of {name}": param.grad for name, param in attention.named_parameters()}
            attention.out_proj.weight.data = random(*attention.out_proj.weight.shape, seed=5)
            return {**{f"query head {head}": out[..., head * size : (head + 1) * size] for head in range(heads)},
                    **gradients, "the gradient of x": x.grad, "the result of self.out_proj": attention(x, *angles)}

        attempt.both(1, program, f"with {heads} query and {shared} key/value heads of {size}, {seq_len} tokens")


@exercise("1", "model.apply_rotary", hints=(
    "Cut x into two halves with chunk(2, dim=-1). Pair p is element p of both.",
    "The rotation of (a, b) by an angle is (a cos - b sin, a sin + b cos). Both halves use the same cosine.",
    "x * cos + (the halves of x exchanged, the one that is now first with a minus) * sin"), wrong=[
    ("no minus", "torch.cat([-x2, x1]", "torch.cat([x2, x1]", "length of a pair"),
    ("the minus at the wrong half", "torch.cat([-x2, x1]", "torch.cat([x2, -x1]", "the other way"),
    ("neighbours form the pairs", "torch.cat([-x2, x1], dim=-1)",
     "torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)", "length of a pair"),
    ("half of x is detached", "torch.cat([-x2, x1]", "torch.cat([-x2.detach(), x1]", "the gradient of x"),
    ("the angles are changed", "torch.cat([-x2, x1], dim=-1) * sin",
     "torch.cat([-x2, x1], dim=-1) * sin.mul_(1).clone() + 0 * sin.add_(1)[..., :1]", "or the angles")])
def rotary(attempt):
    """Rotate the pairs of a query or key by the angles of its positions.

    x has the shape (B, heads, T, hd). Its hd components form hd/2 pairs: pair p is component p and component p + hd/2.
    `cos` and `sin` (T, hd) hold the cosine and sine of each angle: row i is for position i, and column p and column
    p + hd/2 both hold those of the angle by which pair p has to turn. Return the rotated x, in its shape.

        component of x             0     1     2     3     4     5          hd = 6: three pairs, (x0, x3), (x1, x4)
        it belongs to pair         0     1     2     0     1     2          and (x2, x5)
        columns of cos and sin     c0    c1    c2    c0    c1    c2

    A positive angle turns from the first component of a pair to the second one: (1, 0) by 90 degrees becomes (0, 1).
    """
    model = attempt.theirs.load().model
    for batch, heads, seq_len, size in ((1, 1, 4, 2), (2, 3, 7, 6)):
        cos, sin = model.get_cos_sin(seq_len, size, torch.float64, torch.device("cpu"), rope_theta=10000.0)
        x, situation = random(batch, heads, seq_len, size), f"x of shape {[batch, heads, seq_len, size]}"
        given = x.clone().requires_grad_()
        got = model.apply_rotary(given * 1, cos.clone(), sin.clone())
        attempt.same(got, x, f"{situation}: the result", tolerance=torch.inf)  # its shape and dtype
        attempt.require(got.requires_grad, f"{situation}: autograd can't follow what computes the result from x")
        grad = random(*x.shape, seed=1)
        got.backward(grad)
        got, changed = got.detach(), [x.clone(), cos.clone(), sin.clone()]
        model.apply_rotary(*changed)
        attempt.require(all(map(torch.equal, changed, (x, cos, sin))), f"{situation}: the function changes x itself, "
                        "or the angles: make a new tensor")
        before, after, grad = (torch.complex(*each.chunk(2, dim=-1)) for each in (x, got, grad))  # (.., T, hd/2)
        angles = torch.complex(cos, sin)[:, : size // 2]
        wrong = (after - before * angles).abs() > 1e-9
        attempt.require(not wrong[:, :, 0].any(), f"{situation}: at position 0 all angles are 0, but x changes there")
        attempt.require(((after.abs() - before.abs()).abs() < 1e-5).all(),
                        f"{situation}: the length of a pair (x[p], x[p + hd/2]) changes. A rotation keeps it.\n"
                        "  The partner of component p is p + hd/2, and one of the two sines has a minus.")
        attempt.require(not torch.allclose(after, before * angles.conj()), f"{situation}: the pairs turn the other way")
        for b, h, i, p in wrong.nonzero()[:1].tolist():
            numbers = [f"({each.real:.6f}, {each.imag:.6f})" for each in (
                before[b, h, i, p], before[b, h, i, p] * angles[i, p], after[b, h, i, p])]
            attempt.require(False, f"{situation}: pair {p} of position {i} is {numbers[0]}, before the rotation\n  "
                            f"expected  {numbers[1]}\n  got       {numbers[2]}")
        turned = grad * angles.conj()
        attempt.same(given.grad, torch.cat([turned.real, turned.imag], -1), f"{situation}: the gradient of x")


@exercise("1", "references:references.rms_norm_backward", hints=(
    "Compute n = x / sqrt(mean(x^2) + eps) first. The weight's gradient is the sum over all tokens of grad * n.",
    "x enters y twice: directly, and through the root mean square, which is the same number for all D outputs. "
    "Differentiate r = 1 / sqrt(mean(x^2) + eps): dr/dx_j = -r^3 x_j / D.",
    "With h = grad * weight: grad_x = r * (h - n * mean(h * n)), where the mean is over D."), wrong=[
    ("the root mean square is taken for a constant", " - normalised * common)", ")", "has to be 0"),
    ("each token keeps its own gradient of the weight", ".flatten(0, -2).sum(0)", "", "has shape [3, 4]"),
    ("eps is forgotten", "keepdim=True) + eps)", "keepdim=True))", "and eps = 0.5"),
    ("x is changed", "normalised = x * rms_inverse", "normalised = x.mul_(rms_inverse)", "it changes `x`")])
def rms_norm_backward(attempt):
    """Compute the gradients of RMSNorm by hand, without autograd.

    Forward is  y = x / sqrt(mean(x^2) + eps) * weight.  Given are x (..., D), weight (D,), the gradient `grad` (..., D)
    of the loss with respect to y, and the number eps. Return the gradients with respect to x (..., D) and to weight
    (D,), in this order.

        forward   x (..., D), weight (D,)   --->  y (..., D)
        backward  grad_x,     grad_weight   <---  grad

    The mean and the root are taken for each token (all but the last dimension) by itself, and all tokens share the
    weight. x_j acts in two ways: on y_j directly, and on the root mean square of its token, and so on all D numbers of
    y. You may use any arithmetic of tensors, such as x.pow(2).mean(-1, keepdim=True) and rsqrt().
    """
    function = attempt.function()
    for shape, eps in (((3, 4), 0.0), ((2, 3, 5), 0.5), ((2, 3, 5), 1e-5)):
        norm = Program("1").load().model.RMSNorm(shape[-1], eps)
        norm.weight.data = 3 * random(shape[-1], seed=1)
        x, grad = random(*shape).requires_grad_(), random(*shape, seed=2)
        norm(x).backward(grad)
        got = function(x.detach().clone(), norm.weight.detach().clone(), grad.clone(), eps)
        attempt.require(isinstance(got, (tuple, list)) and len(got) == 2, "it has to return two tensors: grad_x, "
                        "grad_weight")
        situation = f"for x of shape {list(shape)} and eps = {eps:g}"
        attempt.same(got[1], norm.weight.grad, f"the gradient of the weight {situation}")
        attempt.require(got[0] is not None, "the gradient of x is None")
        along = float((got[0] * x.detach()).sum(-1).abs().max()) if got[0].shape == x.shape and not eps else 0.0
        attempt.require(along < 1e-9, f"the gradient of x {situation}: of a token, the sum of grad_x * x over its D "
                        f"numbers is {along:.4g}.\n  It has to be 0: without eps, y stays the same if x becomes 1 % "
                        "longer. Is the way over the root mean square right?")
        attempt.same(got[0], x.grad, f"the gradient of x {situation}")
