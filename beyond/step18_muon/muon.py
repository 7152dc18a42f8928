"""Muon over ranks: an optimizer that needs whole matrices (Jordan et al. 2024, Liu et al. 2025).

AdamW treats each number by itself. Muon keeps one average, the momentum, and makes the step of a matrix orthogonal:
from U Σ V^T it takes U V^T, so all directions are learned equally fast. That is a function of the whole matrix, and the
Newton-Schulz iteration that computes it multiplies the matrix by itself. So a shard can no longer begin anywhere:

    dp   Each matrix has one owner among the replicas. A bucket's matrices stand in the order of their owners, so that a
         rank's shard consists of whole matrices. All else is ZeRO: gradients are reduced to the owner, it alone keeps
         the momentum and computes the step, and it sends the new weights to all.
    tp   The owner is a tp group, of which each rank holds a part of each matrix, of its gradient and of its momentum.
         As many matrices as there are tp ranks make a round: rank j receives all parts of matrix j, iterates, and sends
         the parts of the result back. So tp ranks work on different matrices at the same time.

              rank 0  | a0 b0 |              | a0 a1 |  iterates a             | a0 b0 |
              rank 1  | a1 b1 |  all-to-all  | b0 b1 |  iterates b  all-to-all | a1 b1 |
    pp   Each stage has matrices of its own.

Muon is for the matrices of the decoder layers, which map one hidden space to another. The rows of the embedding and of
the final projection are tokens, which are seen seldom or often, and norms are no matrices: AdamW updates these.
"""

import torch
import torch.nn as nn

import process_group_manager as pgm
from data_parallel import DataParallelBucket
from zero import Exchange, ShardedBucket, Zero, check_zero

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan's: steep at 0, so that small singular values grow fast


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """About U V^T of a matrix U Σ V^T (A, B), in its dtype: five steps of a quintic Newton-Schulz iteration.

    A step makes a s + b s^3 + c s^5 of each singular value s, and leaves U and V. A matrix of norm 1 has none above 1.
    """
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.size(0) > matrix.size(1) else matrix  # then X X^T is the smaller product
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)  # a X + (b G + c G G) X
    return x.T if matrix.size(0) > matrix.size(1) else x


def exchange_over_tp(sent: list[torch.Tensor], received: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sends sent[i] to tp rank i, and returns what came from each: tensors of the shapes of `received`."""
    grid = pgm.process_group_manager
    received = [torch.empty_like(tensor) for tensor in received]
    received[grid.tp_rank] = sent[grid.tp_rank]
    Exchange(sent, received, grid.tp_group).wait()
    return received


def orthogonalize_round(parts: list[torch.Tensor], dims: list[int]) -> list[torch.Tensor]:
    """This rank's parts of up to tp_size matrices, which are split along `dims` -> its parts of their U V^T."""
    grid = pgm.process_group_manager
    if grid.tp_world_size == 1:
        return [orthogonalize(part) for part in parts]
    nothing = parts[0].new_empty(0)  # in the last round, some ranks have no matrix
    parts = [part.contiguous() for part in parts] + [nothing] * (grid.tp_world_size - len(parts))
    own = parts[grid.tp_rank]
    gathered, results = exchange_over_tp(parts, [own] * len(parts)), [nothing] * len(parts)
    if grid.tp_rank < len(dims):
        whole, dim = torch.cat(gathered, dims[grid.tp_rank]), dims[grid.tp_rank]  # (A, B)
        results = [part.contiguous() for part in orthogonalize(whole).chunk(len(parts), dim)]
    return exchange_over_tp(results, parts)[: len(dims)]


class Matrix:
    """A matrix of a decoder layer, whole (A, B), of which this rank holds `param`, split along `dim` over tp ranks."""

    def __init__(self, name: str, param: nn.Parameter, dim: int):
        self.name, self.param, self.dim, self.owner = name, param, dim, 0
        tp_size = pgm.process_group_manager.tp_world_size
        self.shape = [size * (tp_size if d == dim else 1) for d, size in enumerate(param.shape)]
        self.work = self.shape[0] * self.shape[1] * min(self.shape)  # of X X^T; the other products are in proportion


def choose_owners(work: list[int], shares: list[int]) -> list[int]:
    """The rank that gets each piece of work, so that ranks have about the parts that `shares` say.

    Greedy (Graham 1969): the largest pieces first, each to the rank whose work, for its share, is the least with it.
    """
    load, owners = [0] * len(shares), [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        owners[i] = min(range(len(shares)), key=lambda rank: (load[rank] + work[i]) / shares[rank])
        load[owners[i]] += work[i]
    return owners


def find_matrices(model: nn.Module, shares: list[int] | None) -> list[Matrix]:
    """The matrices of this rank's decoder layers, each with its owner: the largest first, for rounds of equal work."""
    grid = pgm.process_group_manager
    dims = {getattr(module, key): dim for module in model.modules()
            for key, dim in getattr(module, "tp_dims", {}).items()}
    matrices = [Matrix(name, param, dims.get(param, 0)) for name, param in model.named_parameters()
                if name.startswith("decoder_layers") and param.dim() == 2]
    matrices.sort(key=lambda matrix: -matrix.work)
    work, shares = [matrix.work for matrix in matrices], shares or [1] * grid.dp_world_size
    for matrix, owner in zip(matrices, choose_owners(work, shares)):
        matrix.owner = owner
    if len(shares) > 1 and grid.is_logging_rank:
        owned = [[matrix.work for matrix in matrices if matrix.owner == rank] for rank in range(len(shares))]
        print("matrices of each dp rank:", ", ".join(f"{len(each)} ({sum(each) / sum(work):.1%})" for each in owned))
    return matrices


class MatrixBucket(ShardedBucket):
    """A bucket that is cut between matrices: a shard is all that a rank owns of them, which may be nothing."""

    def __init__(self, params: list[nn.Parameter], group, owner_of: dict[nn.Parameter, int]):
        super().__init__(sorted(params, key=owner_of.get), group, [1] * group.size())
        self.sizes = [sum(param.numel() for param in params if owner_of[param] == rank) for rank in range(group.size())]
        self.shard = nn.Parameter(self.weights.split(self.sizes)[group.rank()])


class MatrixZero(Zero):
    """Zero, with buckets of `matrices` apart from those of all other parameters."""

    def __init__(self, module: nn.Module, level: int, shares: list[int] | None, matrices: list[Matrix]):
        self.owner_of = {matrix.param: matrix.owner for matrix in matrices}
        super().__init__(module, level, shares)

    def initialize_buckets(self, params: list[nn.Parameter], limit: float) -> None:
        for are_matrices in (True, False):
            super().initialize_buckets([param for param in params if (param in self.owner_of) == are_matrices], limit)

    def make_bucket(self, params: list[nn.Parameter]) -> ShardedBucket:
        if params[0] in self.owner_of:
            return MatrixBucket(params, pgm.process_group_manager.dp_group, self.owner_of)
        return super().make_bucket(params)


class Muon(torch.optim.Optimizer):
    """Updates those `matrices` that this dp rank owns. `model` knows their gradients, see its gradient().

    With AdamW's learning rate and weight decay: numbers of U V^T have a root mean square of 1 / sqrt(max(A, B)), and
    0.2 is about that of AdamW's steps.
    """

    def __init__(self, model: DataParallelBucket, matrices: list[Matrix], lr: float, weight_decay: float = 0.01,
                 momentum: float = 0.95):
        self.model, self.dtype = model, model.module.dtype
        self.owned = [matrix for matrix in matrices if matrix.owner == pgm.process_group_manager.dp_rank]
        super().__init__([(matrix.name, matrix.param) for matrix in matrices],
                         {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    def average(self, param: nn.Parameter) -> torch.Tensor:
        """The gradient with Nesterov's momentum, in the dtype of the activations: of this rank's part of a matrix."""
        beta, grad = self.param_groups[0]["momentum"], self.model.gradient(param).view_as(param)
        if param not in self.state:
            self.state[param]["momentum"] = torch.zeros_like(param)
        momentum = self.state[param]["momentum"].lerp_(grad, 1 - beta)
        return grad.lerp(momentum, beta).to(self.dtype)

    @torch.no_grad()
    def step(self) -> None:
        [group], size = self.param_groups, pgm.process_group_manager.tp_world_size
        for i in range(0, len(self.owned), size):
            matrices = self.owned[i : i + size]
            parts = [self.average(matrix.param) for matrix in matrices]
            for matrix, part in zip(matrices, orthogonalize_round(parts, [matrix.dim for matrix in matrices])):
                scale = 0.2 * max(matrix.shape) ** 0.5
                matrix.param.mul_(1 - group["lr"] * group["weight_decay"]).add_(part, alpha=-group["lr"] * scale)


def make_optimizers(model: DataParallelBucket, matrices: list[Matrix], lr: float) -> list[torch.optim.Optimizer]:
    """AdamW for all that is in no matrix, and Muon for the `matrices`, if there are any."""
    for_muon = {matrix.param for matrix in matrices}
    for_muon.update(bucket.shard for bucket in model.buckets if isinstance(bucket, MatrixBucket))
    others = [(name, param) for name, param in model.named_parameters() if param not in for_muon]
    adamw = torch.optim.AdamW(others, lr=lr, fused=True)
    return [adamw, Muon(model, matrices, lr)] if matrices else [adamw]


def check_muon(args):
    """Returns the flags. Replicas always divide Muon's work, so there --zero is 1 at least."""
    if args.optimizer == "muon" and args.dp_size > 1:
        args.zero = args.zero or 1
    return check_zero(args)
