"""Local steps: each replica takes H optimizer steps by itself, then all agree on weights again (Stich 2018).

A round begins with the same weights on all replicas. Each keeps a copy of them, the start:

    replica r    H steps of its own AdamW on its own samples     nothing is sent to other replicas
    all          outer gradient = mean over r of (start - weights of r)      an all-reduce over the dp group
    all          SGD with Nesterov momentum takes a step from the start      the weights of the next round

The outer optimizer treats what the replicas have moved as if it were a gradient (DiLoCo, Douillard et al. 2023). With
learning rate 1 and no momentum, its step ends at the mean of the replicas' weights. AdamW's averages stay on their
replica and are never sent. The last round is shorter where H does not divide the number of steps.

A replica is the tp and pp ranks of one dp rank. They share each local step as ever, and in the exchange each of them
averages the part of the model that it holds.
"""

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from data_parallel import DataParallelBucket
from metrics import RunLogger
from pipeline_parallel import sum_tied_gradients
from utils import UserError, number

fraction = number(float, lambda value: 0 <= value < 1, "0 or more and below 1")


def check_local_flags(args):
    """Fills in the outer optimizer's defaults, which average weights. Raises UserError where they are given in vain."""
    for name, default in (("outer_learning_rate", 1.0), ("outer_momentum", 0.0)):
        if args.local_steps and getattr(args, name) is None:
            setattr(args, name, default)
        elif not args.local_steps and getattr(args, name) is not None:
            raise UserError(f"--{name} {getattr(args, name)} with --local_steps 0, which exchanges gradients: "
                            f"add --local_steps 10, or leave --{name} out")
    if args.local_steps and args.eval_every % args.local_steps:
        raise UserError(f"--eval_every {args.eval_every} with --local_steps {args.local_steps}: replicas agree on "
                        f"weights at the end of a round, use a multiple of {args.local_steps}")
    return args


def ends_round(args, step: int, num_steps: int) -> bool:
    """Whether the replicas exchange after optimizer step `step`, counted from 1. They do after the last one."""
    return args.local_steps > 0 and (step % args.local_steps == 0 or step == num_steps)


class LocalSteps(DataParallelBucket):
    """Wraps this rank's part of a replica. Its buckets carry no gradients, but what the replicas have moved.

    Needs 4 bytes a parameter more than DataParallelBucket, for the weights at the start of the round, and with an outer
    momentum 8. All ranks make one together, because it opens `replica_group`, the tp and pp ranks of this replica.
    """

    def __init__(self, module: nn.Module, args):
        super().__init__(module)
        replicas = pgm.process_group_manager.ranks.flatten(1).tolist()
        self.replica_group, _ = dist.new_subgroups_by_enumeration(replicas, pgm.timeout)
        self.start = [param.detach().clone() for param in module.parameters()]
        self.outer_optimizer = torch.optim.SGD(
            module.named_parameters(), args.outer_learning_rate, args.outer_momentum, nesterov=args.outer_momentum > 0)

    def mark_param_as_ready(self, param: nn.Parameter) -> None:
        """Called by backward. The gradient adds up in its bucket, which is not sent."""
        self.bucket_of[param].take(param)

    def finish_gradient_sync(self) -> None:
        """Called after the last backward of a step: the gradient of this replica is complete."""

    @torch.no_grad()
    def exchange(self) -> None:
        """Ends a round: from its start, the outer optimizer takes one step along the mean of what replicas moved."""
        for param, start in zip(self.module.parameters(), self.start):
            param.grad = start - param
            param.copy_(start)
            if self.buckets:  # none with a single replica
                self.bucket_of[param].take(param)
        super().finish_gradient_sync()  # all buckets: divided by dp_size, all-reduced
        self.keep_copies_equal()
        self.outer_optimizer.step()
        for param, start in zip(self.module.parameters(), self.start):
            start.copy_(param)

    def keep_copies_equal(self) -> None:
        """The first and the last stage take the mean of their two copies of a tied embedding's outer gradient.

        The copies may differ in the last bit: each stage has buckets of its own, in which sums have other orders.
        """
        sum_tied_gradients(self.module)
        if self.module.config.tie_word_embeddings and self.module.embedding is not None:
            self.module.embedding.weight.grad /= pgm.process_group_manager.pp_ends_group.size()


class RoundLogger(RunLogger):
    """Keeps the rows of a round and records them when it ends: then replicas average them, and communicate anyway."""

    def __init__(self, args, grid, num_steps: int, tokens_per_step: int):
        super().__init__(args, grid, num_steps, tokens_per_step)
        self.args, self.rows = args, []

    def log(self, step: int, loss: float, grad_norm: float, *others: float, **more: float) -> None:
        """Takes the loss and the gradient norm of this replica. Those recorded are means over the replicas."""
        self.rows.append(((step, loss, grad_norm, *others), more))
        if not ends_round(self.args, step, self.num_steps):
            return
        group = pgm.process_group_manager.dp_group
        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        means = torch.tensor([row[1:3] for row, _ in self.rows], dtype=torch.float64, device=device) / group.size()
        dist.all_reduce(means, group=group)
        for ((step, _, _, *others), more), mean in zip(self.rows, means.tolist()):
            super().log(step, *mean, *others, **more)
        self.rows.clear()
