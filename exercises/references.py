"""Solutions of what no step holds: the exercises whose place is in this file."""

import torch
import torch.distributed as dist


def ring_all_reduce(tensor: torch.Tensor) -> None:
    """Sums `tensor` (N,) over all n ranks, in place. n divides N.

    Each rank sends to the rank after it only, and receives from the rank before it: 2 (n - 1) messages of N / n
    numbers. No rank can do with fewer bytes: each of the n ranks has to learn the sum of n - 1 parts that it does not
    compute, and others have to learn n - 1 parts of its own (Patarasuk and Yuan 2009).
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
