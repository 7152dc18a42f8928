"""Solutions of what no step holds: the exercises whose place is in this file."""

import functools

import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sums `tensor` (N,) over all n ranks, in place. n divides N.

    Each rank sends to the rank after it only, and receives from the rank before it: 2 (n - 1) messages of N / n
    numbers. In all, n - 1 messages of each number are needed to add it up, and n - 1 more until all ranks know the sum:
    2 (n - 1) N numbers. So some rank sends 2 (n - 1) N / n, the mean, or more (Patarasuk and Yuan 2009).
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = list(tensor.chunk(size))  # views
    after, before = (rank + 1) % size, (rank - 1) % size
    for step in range(2 * (size - 1)):
        outgoing, incoming = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        received = torch.empty_like(incoming)
        sending = dist.isend(outgoing, after)
        dist.recv(received, before)
        sending.wait()
        if step < size - 1:  # the partial sums travel once around; then the finished sums do
            incoming += received
        else:
            incoming.copy_(received)


def rms_norm_backward(
    x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor, eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of y = x / sqrt(mean(x^2) + eps) * weight with respect to x (..., D) and weight (D,).

    `grad` (..., D) is the gradient with respect to y.
    """
    rms_inverse = (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt()  # (..., 1)
    normalised = x * rms_inverse
    grad_normalised = grad * weight
    common = (grad_normalised * normalised).mean(-1, keepdim=True)  # what x changes through the root mean square
    grad_x = rms_inverse * (grad_normalised - normalised * common)
    return grad_x, (grad * normalised).flatten(0, -2).sum(0)


def broadcast(tensor: torch.Tensor, source: int) -> None:
    """Gives all n ranks what rank `source` has in `tensor`, in place, in ceil(log2 n) rounds.

    No way has fewer rounds: in a round, each rank sends at most one message, so the number of ranks that have the
    tensor can at most double. It begins with one, so after k rounds at most 2^k have it.
    """
    size = dist.get_world_size()
    number, distance = (dist.get_rank() - source) % size, 1  # a binomial tree, in which the source is number 0
    while distance < size:
        if number < distance and number + distance < size:
            dist.send(tensor, (number + distance + source) % size)
        elif distance <= number < 2 * distance:
            dist.recv(tensor, (number - distance + source) % size)
        distance *= 2


def cut_layers(costs: list[float], speeds: list[float]) -> list[int]:
    """How many consecutive layers each stage gets, one or more, so that the slowest stage is as fast as possible.

    Layer i takes costs[i] / speeds[s] seconds on stage s. Dynamic programming: the best cut of the first k layers into
    s stages ends with some last stage, and what is before it is itself cut as well as possible.
    """
    @functools.cache
    def best(stages: int, layers: int) -> tuple[float, list[int]]:
        if stages == 1:
            return sum(costs[:layers]) / speeds[0], [layers]
        cuts = []
        for first in range(stages - 1, layers):  # of the last stage
            slowest, sizes = best(stages - 1, first)
            cuts.append((max(slowest, sum(costs[first:layers]) / speeds[stages - 1]), [*sizes, layers - first]))
        return min(cuts)

    return best(len(speeds), len(costs))[1]


def v_shape(rank: int, num_ranks: int, num_microbatches: int) -> list[tuple[str, int, int]]:
    """The actions (kind, micro-batch, chunk) of a rank that holds the virtual stages rank and 2 p - 1 - rank.

    Every four units of time a new micro-batch starts, and it goes through all 2p stages and back without a stop. The
    four actions of a micro-batch on a rank then come at four different times modulo 4 if p is odd; if p is even, all
    backwards come two units later. The whole takes 4 (m + p - 1) units, or two more.

    A micro-batch's activations are alive for 4p + 2 units on each rank, its two chunks together: 4p - 2s on stage s at
    the least. So no schedule that is as quick keeps fewer than m (4p + 2) / (4 (m + p - 1)) alive. This comes close to
    p + 1/2, and p + 1 are alive here if p is odd (Qi et al. 2024, Pipeline Parallelism with Controllable Memory).
    """
    last, pause, times = 2 * num_ranks - 1, 2 * (num_ranks % 2 == 0), []
    for chunk, stage in enumerate((rank, last - rank)):
        for i in range(num_microbatches):
            times.append((4 * i + stage, "F", i, chunk))
            times.append((4 * i + 2 * last + 1 - stage + pause, "B", i, chunk))
    return [(kind, i, chunk) for _, kind, i, chunk in sorted(times)]


class ErrorFeedback:
    """Sends gradients through a coarse quantiser, and what it has left over with the next one.

    The sum of all that was sent is the sum of all gradients less what is left over now: at each step, sent = gradient +
    left over before - left over after, and these differences cancel (Seide et al. 2014, Karimireddy et al. 2019).
    """

    def __init__(self, quantise):
        """`quantise(tensor)` returns a tensor of the same shape: what arrives at the other side."""
        self.quantise, self.left_over = quantise, 0.0

    def send(self, gradient: torch.Tensor) -> torch.Tensor:
        """What is sent in place of this step's gradient (N,). `gradient` stays as it is."""
        wanted = gradient + self.left_over
        sent = self.quantise(wanted)
        self.left_over = wanted - sent
        return sent


class GatherAlike(torch.autograd.Function):
    """An all-gather in front of something that all ranks compute alike: its types are V -> I."""

    @staticmethod
    def forward(ctx, x):  # (N / ranks, D) -> (N, D)
        rows = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, x.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(ctx, grad):  # (N, D) -> (N / ranks, D)
        # I: the same on each rank, and all of it. A reduce-scatter, which belongs to V -> R, would add it up n times.
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def type_on_tp(name: str, sequence_parallel: bool) -> str:
    """The type along tp of the weight `name` of a Llama that is split over tp ranks: "R", "I" or "V"."""
    if "norm" not in name:
        return "V"
    # Norms are whole, and see what all ranks have, or each rank's own tokens: then each has a summand of the gradient.
    return "R" if sequence_parallel else "I"


def routed(x, router, up, down, f, g):
    """Tokens x (N, D) pass an MLP whose width is split over the tp ranks, weighted by a router, whole on each rank."""
    weights = torch.softmax(x @ router, dim=-1)[:, :1]  # (N, 1)
    x, weights = f(x), f(weights)
    return g(torch.relu(x @ up) @ down * weights)
