"""Step 15: keys and values around a ring (context parallelism)."""

import torch

from catalogue import exercise


def causal_attention(q, k, v):
    """The reference: all queries, keys and values (B, H, T, hd) in one process, and a softmax over all keys."""
    scores = q @ k.transpose(-1, -2) * q.size(-1) ** -0.5
    return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1) @ v


def positions_of(layout: str, size: int, seq_len: int) -> list[torch.Tensor]:
    """What each rank holds by the chapter's definition of a layout, for the exercises that do not ask for it."""
    chunks = torch.arange(seq_len).chunk(2 * size)
    return [torch.cat([chunks[rank], chunks[2 * size - 1 - rank]] if layout == "zigzag" else
                      [chunks[2 * rank], chunks[2 * rank + 1]]) for rank in range(size)]


@exercise("15", "context_parallel.merge", hints=(
    "The denominators are exp(lse) and exp(other_lse). The output is the mean of the two outputs with these weights.",
    "exp overflows. The weight of the other part is exp(b) / (exp(a) + exp(b)) = sigmoid(b - a), and one of the two "
    "lse may be -inf.",
    "lse has one dim less than out: unsqueeze(-1). torch.logaddexp gives the new lse. Change both in place: out -= "
    "..., lse.copy_(...)."), wrong=[
    ("exponentials overflow", "torch.sigmoid(other_lse - lse)", "(other_lse.exp() / (lse.exp() + other_lse.exp()))",
     "scores near 10,000: out"),
    ("the mean of both", "torch.sigmoid(other_lse - lse)", "torch.full_like(lse, 0.5)", "scores near 0: out"),
    ("the weights are swapped", "torch.sigmoid(other_lse - lse)", "torch.sigmoid(lse - other_lse)",
     "scores near 0: out"),
    ("the first sample only", "out -= torch.sigmoid(other_lse - lse).unsqueeze(-1) * (out - other_out)",
     "out[:1] -= (torch.sigmoid(other_lse - lse).unsqueeze(-1) * (out - other_out))[:1]", "scores near 0: out"),
    ("the other set is changed", "    lse.copy_(", "    other_out.zero_()\n    lse.copy_(", "it changes `other_out`")])
def merge(attempt):
    """Join the outputs of a softmax over two sets of keys into that over both.

    A query's output over some keys is the sum of exp(score) * value over them, divided by the sum of exp(score). That
    denominator's logarithm is lse. Given are both for two sets of keys; `out` and `lse` have to become those over all
    keys of the two, in place:

        keys 0-3:  out (B, H, m, hd), lse (B, H, m)                \\
                                                                    >   out, lse: keys 0-5
        keys 4-5:  other_out (B, H, m, hd), other_lse (B, H, m)    /

    A score can be 10,000, so that its exponential is too large for any dtype, or -10,000. At the beginning, no keys
    have been seen: then out is 0 and lse is -inf. Each of the two sets may be the empty one, but not both at once.
    """
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 2, 4, 6, generator=generator, dtype=torch.float64)
    values = torch.randn(2, 2, 6, 3, generator=generator, dtype=torch.float64)

    def over(scores, keys):
        part, value = scores[..., keys], values[..., keys, :]
        return part.softmax(-1) @ value, part.logsumexp(-1)

    lopsided = scores + 500 * torch.tensor([0.0, 0, 0, 0, 1, 1], dtype=torch.float64)
    situations = {"scores near 0": (scores, 4), "scores near 10,000": (scores + 1e4, 4),
                  "scores near -10,000": (scores - 1e4, 4), "second scores larger by 500": (lopsided, 4),
                  "first scores larger by 500": (-lopsided, 4), "no keys in the first set": (scores, 0),
                  "no keys in the second set": (scores, 6), "only one key in the second set": (scores, 5)}
    for what, (scores, cut) in situations.items():
        (out, lse), other = over(scores, slice(cut)), over(scores, slice(cut, None))
        attempt.function(changes=(0, 1))(out, lse, *other)
        for name, got, expected in zip(("out", "lse"), (out, lse), over(scores, slice(6))):
            attempt.same(got, expected, f"{what}: {name}", tolerance=1e-12)


@exercise("15", "context_parallel.local_positions", hints=(
    "Cut torch.arange(seq_len) into 2P chunks with tensor_split or chunk, choose two of them, and concatenate them.",
    "Of T tokens, token t sees t + 1. So an early chunk is little work and a late one much: pair them.",
    "In \"zigzag\", rank r takes the r-th chunk from the beginning and the r-th one from the end: 2P - 1 - r."), wrong=[
    ("two ranks hold the same chunk", "2 * size - 1 - rank)", "2 * size - 1)", "of all ranks together"),
    ("the later chunk comes first", "[chunks[first], chunks[second]]", "[chunks[second], chunks[first]]",
     "the positions"),
    ("one chunk for each rank", "[chunks[first], chunks[second]]", "[chunks[first]]", "the positions"),
    ("chunks of 3 tokens", "chunks = torch.arange(seq_len).tensor_split(2 * size)",
     "chunks = torch.arange(6 * size).tensor_split(2 * size)", "the positions")])
def zigzag(attempt):
    """Choose the tokens of each rank such that all have equally much to compute.

    A text of seq_len tokens is cut into 2P equal chunks for P ranks, and each rank holds two of them. Return the
    positions of this rank's tokens in the text, (seq_len / P,) integers in ascending order. P is cp_world_size of
    `pgm.process_group_manager`, and the rank is its cp_rank. There are two layouts, here for P = 2:

        "contiguous"   chunks 2r and 2r + 1            chunk   0    1    2    3
                                                       rank    0    0    1    1
        "zigzag"       chunk r, and a later one                0    ?    ?    ?

    A query attends to the keys up to its own position. At hop h, rank r has the keys of rank r - h (modulo P), and
    computes the score of each of its queries with each of these keys that is visible to it. All ranks wait for the
    slowest at each hop. In "zigzag", choose each rank's later chunk so that no rank is slower than the others.
    """
    for size in (1, 2, 3, 4):
        tokens = 2 * size * (chunk := size + 1)
        for layout in ("contiguous", "zigzag"):
            def program(modules, rank):
                attempt.grid(modules, cp_size=size)
                return modules.context_parallel.local_positions(layout, tokens)

            held, _ = attempt.run(size, program)
            which = f"{layout}, {size} ranks, {tokens} tokens"
            for rank, (got, expected) in enumerate(zip(held, positions_of(layout, size, tokens))):
                ordered = expected if layout == "contiguous" else got.sort().values
                attempt.same(got, ordered, f"{which}: the positions", rank)
                attempt.same(got[:chunk], expected[:chunk], f"{which}: its first chunk, of {chunk} tokens", rank)
                attempt.same(len(got), tokens // size, f"{which}: how many tokens it has", rank)
            together = sorted(torch.cat(held).tolist())
            attempt.same(together, [*range(tokens)], f"{which}: the positions of all ranks together")
    # by rank and hop; no layout can need less than the mean at each hop
    scores = torch.tensor([[int((held[rank][:, None] >= held[rank - hop]).sum()) for hop in range(size)]
                           for rank in range(size)], dtype=torch.float64)
    attempt.score("scores that the slowest ranks compute at the 4 hops, relative to the mean of 4 ranks",
                  (scores.max(dim=0).values.sum() / scores.mean(dim=0).sum()).item(), 1.0)


@exercise("15", "context_parallel.RingAttention.backward", hints=(
    "At each hop: if something is visible, compute this rank's part with attend_backward, for the visible queries and "
    "keys only, and add the part of q to grad_q.",
    "The gradients of the keys that you have now arrive from the rank before, which had these keys one hop ago: "
    "gradients = message.wait(). At the first hop there are none, and you begin with zeros.",
    "Add torch.stack([part_k, part_v]) at the visible keys, and send the sum on with message = Message(gradients, ...) "
    "at every hop, also where nothing was visible. The line after the loop receives the last one."),
    blank=("for (k, v), block",), wrong=[
    ("only queries get a gradient by their own keys", "grad_q[:, :, queries] += part_q",
     "grad_q[:, :, queries] = part_q", "the gradient of its queries"),
    ("what arrives is dropped", "gradients = message.wait()", "message.wait()", "the gradient of its values"),
    ("nothing is sent where nothing is visible", "        message = Message(",
     "        message = message if block is None else Message(", "rank"),
    ("the given gradient is cleared", "    return None, grad_q", "    grad.zero_()\n    return None, grad_q",
     "backward changes `grad`")])
def ring_backward(attempt):
    """Send the gradients of keys and values around the ring, behind their keys and values.

    The rank has the gradient `grad` of its output, its queries q and its output `out`, all (B, H, T/P, hd), and lse
    (B, H, T/P). Keys and values go around once more. The gradients of those that are here now have to come home:

                hop 0              hop 1                    hop 2 = P - 1             home
        rank 0  keys of 0, g0 -->  keys of 2, g2 + ... -->  keys of 1, g1 + ... -->   receives g0, complete

    Fill grad_q, and leave in `message` the last of P messages: the line after your loop receives it.

    You may call: `for (k, v), block in go_around(own, ctx.layout)`: P hops with the keys and values (B, K, T/P, hd) of
    a rank, this one's first. `block` is None where nothing is visible, else (queries, keys, is_causal), two slices
    along the tokens and a flag. attend_backward(grad, q, k, v, out, lse, is_causal): the parts of the gradients of q, k
    and v that come from the given queries and keys. Message(tensor, kind): sends a tensor to the next rank while one of
    its shape comes from the rank before, which message.wait() returns; `kind` is a text for the timeline. `gradients`
    (2, B, K, T/P, hd) is zero at the beginning, for keys and values.
    """
    generator = torch.Generator().manual_seed(0)
    for size, layout, local in ((2, "zigzag", 4), (3, "contiguous", 6), (4, "zigzag", 2)):
        length = size * local
        q, k, v, grad = (torch.randn(2, 2, length, 4, generator=generator, dtype=torch.float64) for _ in range(4))
        held = positions_of(layout, size, length)

        def program(modules, rank):
            attempt.grid(modules, cp_size=size)
            parts = [each[:, :, held[rank]].clone().requires_grad_() for each in (q, k, v)]
            mine = grad[:, :, held[rank]]
            modules.context_parallel.RingAttention.apply(layout, *parts).backward(mine)
            attempt.require(torch.equal(mine, grad[:, :, held[rank]]), f"rank {rank}: backward changes `grad`, which "
                            "autograd may use elsewhere, too")
            return [part.grad for part in parts]

        whole = [each.clone().requires_grad_() for each in (q, k, v)]
        causal_attention(*whole).backward(grad)
        got, _ = attempt.run(size, program)
        for name, i in (("queries", 0), ("values", 2), ("keys", 1)):
            for rank in range(size):
                attempt.same(got[rank][i], whole[i].grad[:, :, held[rank]], f"{layout} with {size} ranks: the "
                             f"gradient of its {name}, compared with one process", rank)
