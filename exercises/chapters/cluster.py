"""Unlike machines and slow links: shares by speed, and smaller messages."""

import itertools
import numbers

import torch

from catalogue import exercise


def slowest(shares: list[int], seconds_each: list[float], besides: list[float]) -> float:
    return max(more + share * seconds for share, seconds, more in zip(shares, seconds_each, besides))


def least(total: int, seconds_each: list[float], limits: list[int], besides: list[float]) -> float:
    """Of all splits that the limits allow, the time of the best one: the optimum by search."""
    splits = itertools.product(*(range(1, limit + 1) for limit in limits))
    return min(slowest(list(split), seconds_each, besides) for split in splits if sum(split) == total)


@exercise("cluster", "cluster:shares.shares_by_speed", hints=(
    "Give each rank one piece. Then deal the others one by one.",
    "The next piece goes to the rank that would be done with it first: besides + (share + 1) * seconds_each.",
    "A rank whose share is at its limit takes part no more."),
    blank=("shares = ", "done = ", "heapq.heapify", "for _ in"), wrong=[
    ("a piece is left over", "for _ in range(total - num_ranks):", "for _ in range(total - num_ranks - 1):",
     "the sum of the shares"),
    ("limits are ignored", "if shares[rank] < limits[rank]:", "if True:", "beyond a limit"),
    ("a rank may have nothing", "shares = [1] * num_ranks", "shares = [2] + [0] + [1] * (num_ranks - 2)",
     "a rank has no piece"),
    ("all are equally fast", "        _, rank = heapq.heappop(done)",
     "        rank = min(range(num_ranks), key=lambda rank: (shares[rank] >= limits[rank], shares[rank], rank))",
     "times as long as the best shares")])
def shares_by_speed(attempt):
    """Divide equal pieces of work between ranks of unlike speeds.

    There are `total` layers or micro-batches. Rank r needs seconds_each[r] for one of them, and besides[r] seconds in
    any case. It can take limits[r] pieces at most, and has to take one at least. All work at the same time:

        total = 7, seconds_each = [1, 2, 4]          rank 0   # # # #      4 pieces of 1 s
                                                     rank 1   ## ##        2 pieces of 2 s
                                                     rank 2   ####         1 piece of 4 s     all are done after 4 s

    Return a list of the number of pieces for each rank, such that the rank that is done last is done as early as
    possible. What can't be divided has been refused above your lines.
    """
    worst = 1.0
    for total, seconds, limits, besides in (
            (7, [1.0, 2.0, 4.0], [7] * 3, [0.0] * 3), (8, [1.0, 1.0, 3.0], [8] * 3, [0.0] * 3),
            (9, [1.0, 2.0, 2.0], [3, 9, 9], [0.0] * 3), (8, [1.0, 1.0, 1.0], [8] * 3, [4.0, 0.0, 0.0]),
            (14, [1.0, 1.0], [14] * 2, [4.0, 0.0]),
            (3, [1.0, 9.0, 9.0], [3] * 3, [0.0] * 3),
            (11, [1.0, 1.7, 2.3, 5.1], [11, 3, 11, 11], [0.3, 0.0, 2.5, 1.0])):
        what = f"total={total}, seconds_each={seconds}, limits={limits}, besides={besides}"
        shares = attempt.function()(total, seconds, limits, besides)
        attempt.same(len(shares), len(seconds), f"{what}: the length of {shares}")
        attempt.same(sum(shares), total, f"{what}: the sum of the shares {shares}")
        attempt.require(all(isinstance(share, numbers.Integral) for share in shares), f"{what}: pieces are whole, and "
                        f"not {shares}")
        attempt.require(min(shares) >= 1, f"{what}: a rank has no piece in {shares}")
        attempt.require(all(share <= limit for share, limit in zip(shares, limits)),
                        f"{what}: {shares} is beyond a limit")
        longer = slowest(shares, seconds, besides) / least(total, seconds, limits, besides)
        attempt.require(longer < 2, f"{what}: {shares} takes {longer:.2f} times as long as the best shares")
        worst = max(worst, longer)
    attempt.score("seconds of the slowest rank, in units of the least possible (all splits are tried)", worst, 1.0)


@exercise("cluster", "cluster:compression.encode", hints=(
    "A row's scale is its largest magnitude / 127: amax over dim 1 of abs(). A number becomes round(number / scale).",
    "A row of zeros has the scale 0, and 0 / 0 is not 0: divide by 1 there. A row with a NaN or an infinity has a "
    "scale that is not finite, and decode then returns a row that is not finite: its numbers may be anything.",
    "torch.cat([scales.flatten().view(torch.uint8), numbers.flatten().view(torch.uint8)]), with float32 scales and "
    "int8 numbers."), blank=("rows = ", "scales = ", "steps = ", "numbers = ", "return torch.cat"), wrong=[
    ("a NaN becomes a number", "rows.abs()", "rows.nan_to_num().abs()", "a row with nan arrives with finite"),
    ("numbers are cut off", "steps.nan_to_num().round()", "steps.nan_to_num().trunc()", "more than half a step"),
    ("x is changed", "steps = rows / scales", "steps = rows.div_(1)\n    rows /= scales", "encode changes x"),
    ("one scale for all rows", "rows.abs().amax(dim=1, keepdim=True) / 127",
     "rows.abs().amax().expand(len(rows), 1).contiguous() / 127", "more than half a step")])
def quantise(attempt):
    """Encode a tensor as int8 numbers with one scale a row.

    A row is the last dim of x, with N numbers, and there are R of them. Its largest magnitude becomes 127 or -127, zero
    stays zero, and all other numbers are rounded to the nearest step between:

        row       0.50   -2.54    0.031      scale = 2.54 / 127 = 0.02
        numbers     25    -127        2      on the other side: 0.50, -2.54, 0.04

    Return one flat tensor of bytes (torch.uint8): first the R scales in float32, 4 bytes each, then the R * N numbers
    as int8. tensor.view(torch.uint8) shows a contiguous tensor as bytes. A row of zeros has to arrive as zeros. Where a
    row has a NaN or an infinity, its scale must not be finite: then all of the row arrives as not finite, and no other
    row suffers. x itself must not change. Without int8, the line above yours returns x in `dtype`.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, generator=generator) * torch.tensor([1e-4, 1.0, 300.0])[:, None]
    x[1, 0] = 0
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        modules, given = attempt.theirs.load(), x.to(dtype, copy=True)
        message = modules.compression.encode(given, torch.int8)
        attempt.require(torch.equal(given, x.to(dtype)), f"{dtype}: encode changes x, which is needed afterwards")
        attempt.require(isinstance(message, torch.Tensor) and message.dtype == torch.uint8 and message.dim() == 1,
                        f"{dtype}: the message has to be one flat tensor of torch.uint8")
        attempt.same(message.numel(), 4 * 6 + 6 * 8, f"{dtype}: the bytes of a message of 6 rows of 8 numbers")
        got = modules.compression.decode(message, (2, 3, 8), torch.int8, torch.float64)
        half = given.double().abs().amax(-1, keepdim=True) / 254 * (1 + 1e-4)  # of a step
        error = (got - given.double()).abs()
        attempt.require(not error.isnan().any(), f"{dtype}: decode returns NaN for finite rows. Row 3 has only zeros")
        attempt.require(bool((error <= half).all()), f"{dtype}: rounding moves a number by more than half a step of "
                        "its row: the largest error of each row, in steps, is "
                        f"{(error / half.clamp(min=1e-30) / 2).amax(-1).tolist()}")
    for bad in (torch.nan, torch.inf, -torch.inf):
        broken = x.clone()
        broken[0, 1, 2] = bad
        got = modules.compression.decode(modules.compression.encode(broken, torch.int8), (2, 3, 8), torch.int8, x.dtype)
        attempt.require(not got[0, 1].isfinite().any(), f"a row with {bad} arrives with finite numbers: "
                        f"{got[0, 1].tolist()}")
        got[0, 1] = 0
        attempt.require(bool(got.isfinite().all()), f"a row with {bad} makes other rows arrive as not finite")


@exercise("cluster", "references:references.ErrorFeedback", hints=(
    "Keep one tensor from call to call: the difference between what you wanted to send and what quantise made of it.",
    "What you want to send is the gradient plus what was left over before.",
    "Three lines: wanted = gradient + left over; sent = quantise(wanted); left over = wanted - sent."), wrong=[
    ("nothing is left over", "self.left_over = wanted - sent", "self.left_over = 0.0", "the sum of what was sent"),
    ("only this step's error is kept", "self.left_over = wanted - sent", "self.left_over = gradient - sent",
     "the sum of what was sent"),
    ("the sign is wrong", "self.left_over = wanted - sent", "self.left_over = sent - wanted",
     "the sum of what was sent"),
    ("quantise() is torch's round", "sent = self.quantise(wanted)", "sent = wanted.round()", "that is not torch.round"),
    ("all tensors share one", "        self.left_over = wanted - sent\n",
     '        type(self).left_over = wanted - sent\n        vars(self).pop("left_over", None)\n',
     "the sum of what was sent")])
def error_feedback(attempt):
    """Send what the quantisation of a gradient leaves over with the next step's gradient.

    A quantised gradient is wrong by up to half a step in each number. A small gradient beside a large one is rounded to
    zero in every step, and its weight never learns. Error feedback adds what was lost to the next gradient before that
    is quantised, so nothing is lost for ever. With steps of 1:

        gradient             0.4    0.4    0.4    0.4
        plus left over       0.4    0.8    0.2    0.6
        sent                 0      1      0      1         the sum is 2, where that of the gradients is 1.6
        left over            0.4   -0.2    0.2   -0.4

    Write a class for one tensor. ErrorFeedback(quantise) is made once: quantise(tensor) returns a tensor of the same
    shape, which is what arrives at the other side. send(gradient) is called at each step and returns what is sent.
    `gradient` must not change.
    """
    generator = torch.Generator().manual_seed(0)
    make, given_back = attempt.function(), []
    feedback, another, sent, total = make(torch.round), make(torch.round), torch.zeros(5), torch.zeros(5)
    for step in range(1, 101):
        gradient = torch.randn(5, generator=generator) * torch.tensor([0.1, 0.4, 1.0, 3.0, 0.0]) + 0.3
        given = gradient.clone()
        part = feedback.send(gradient)
        another.send(torch.full((5,), 0.3))  # of another tensor, which is none of this one's business
        attempt.require(torch.equal(given, gradient), f"step {step}: send() changes the gradient that it is given")
        attempt.same(part, part.round(), f"step {step}: what is sent, which has to come from quantise, in steps of 1")
        sent, total = sent + part, total + given
        # What is left over is at most half a step, and nothing else is missing in the sum.
        attempt.require(bool(((sent - total).abs() <= 0.5 + 1e-4).all()), f"after step {step}, the sum of what was "
                        f"sent is {sent.tolist()}, but that of the gradients {total.tolist()}: they may differ by half "
                        "a step, 0.5")

    def coarse(tensor):  # int8 with one scale, which a large number makes coarse
        scale = tensor.abs().max() / 127
        given_back.append((tensor / scale).round() * scale)
        return given_back[-1]

    weights, target = torch.zeros(4), torch.tensor([0.0, 1.0, -1.0, 0.5])
    feedback = make(coarse)
    for step in range(2000):  # the first weight's gradient is noise; alone, quantise() rounds the others to zero
        gradient = weights - target + torch.tensor([1000.0 * (-1) ** step, 0, 0, 0])
        part = feedback.send(gradient)
        attempt.require(len(given_back) == step + 1 and torch.equal(part, given_back[-1].to(part.dtype)), "with a "
                        "quantise() that is not torch.round, send() returns something else than it does")
        weights = weights - 0.02 * part
    error = (weights - target)[1:].abs().max().item()
    attempt.require(error < 0.3, f"SGD with a coarse quantisation ends {error:.2f} from the optimum, not within 0.3")
