"""Wrong and right answers to the exercises of cluster/."""

from versions import Versions, Wrong

VERSIONS = {
    "shares_by_speed": Versions(
        wrong=[
            Wrong("a piece is left over", "for _ in range(total - num_ranks):",
                  "for _ in range(total - num_ranks - 1):", "the sum of the shares"),
            Wrong("limits are ignored", "if shares[rank] < limits[rank]:", "if True:", "beyond a limit"),
            Wrong("a rank may have nothing", "shares = [1] * num_ranks", "shares = [2] + [0] + [1] * (num_ranks - 2)",
                  "a rank has no piece"),
            Wrong("all are equally fast", "        _, rank = heapq.heappop(done)", "        rank = "
                  "min(range(num_ranks), key=lambda rank: (shares[rank] >= limits[rank], shares[rank], rank))",
                  "times as long as the best shares"),
        ],
        right='''
def shares_by_speed(total, seconds_each, limits=None, besides=None):
    shares, ranks = [1] * len(seconds_each), range(len(seconds_each))
    while sum(shares) < total:  # right, but it forgets what a rank needs besides
        free = [rank for rank in ranks if shares[rank] < limits[rank]]
        shares[min(free, key=lambda rank: (shares[rank] + 1) * seconds_each[rank])] += 1
    return shares
'''),
    "quantise": Versions(
        wrong=[
            Wrong("a NaN becomes a number", "rows.abs()", "rows.nan_to_num().abs()", "a row with nan arrives with "
                "finite"),
            Wrong("numbers are cut off", "steps.nan_to_num().round()", "steps.nan_to_num().trunc()", "more than half "
                "a step"),
            Wrong("x is changed", "steps = rows / scales", "steps = rows.div_(1)\n    rows /= scales",
                  "encode changes x"),
            Wrong("one scale for all rows", "rows.abs().amax(dim=1, keepdim=True) / 127",
                  "rows.abs().amax().expand(len(rows), 1).contiguous() / 127", "more than half a step"),
        ],
        right='''
def encode(x, dtype):
    if dtype != torch.int8:
        return x.to(dtype).contiguous()
    rows = x.flatten(0, -2).to(torch.float32)
    largest = torch.maximum(rows.max(dim=1).values, -rows.min(dim=1).values)
    numbers = torch.round(rows * 127 / largest.clamp(min=1e-37)[:, None])
    numbers = torch.where(numbers.isfinite(), numbers, 0).to(torch.int8)
    return torch.cat(((largest / 127).view(torch.uint8), numbers.view(torch.uint8).flatten()))
'''),
    "error_feedback": Versions(
        wrong=[
            Wrong("nothing is left over", "self.left_over = wanted - sent", "self.left_over = 0.0", "the sum of what "
                "was sent"),
            Wrong("only this step's error is kept", "self.left_over = wanted - sent",
                  "self.left_over = gradient - sent", "the sum of what was sent"),
            Wrong("the sign is wrong", "self.left_over = wanted - sent", "self.left_over = sent - wanted",
                  "the sum of what was sent"),
            Wrong("quantise() is torch's round", "sent = self.quantise(wanted)", "sent = wanted.round()",
                  "that is not torch.round"),
            Wrong("all tensors share one", "        self.left_over = wanted - sent\n",
                  "        type(self).left_over = wanted - sent\n        vars(self).pop(\"left_over\", None)\n",
                  "the sum of what was sent"),
        ],
        right='''
class ErrorFeedback:
    def __init__(self, quantise):
        self.quantise, self.wanted, self.sent = quantise, 0.0, 0.0

    def send(self, gradient):
        self.wanted = self.wanted + gradient.double()  # all gradients, less all that was sent
        part = self.quantise(self.wanted - self.sent)
        self.sent = self.sent + part
        return part.to(gradient.dtype)
'''),
}
