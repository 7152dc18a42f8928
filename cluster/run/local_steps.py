"""Local steps (local SGD, Stich 2018; DiLoCo, Douillard et al. 2023): replicas that exchange once a round.

A replica is a pipeline with its tensor-parallel ranks: one machine, or several. A round, from weights that are the same
on all replicas, is a step of the run, as everything else sees it:

    replica k  takes n_k optimizer steps of its own, with its own AdamW, and sends nothing to the others
    all        outer gradient = sum over k of w_k * (agreed weights - weights of replica k)
    all        agreed weights: one step of SGD with Nesterov momentum, along the outer gradient; all go on from there

So execute_pipeline() returns when the outer gradient is there, as the gradient of each parameter, and step() of the
optimizer takes the outer step. n_k goes by speed, so that all replicas are done at the same time; --local_steps is
their mean. w_k is the replica's part of the round's samples.

Each replica has averages of AdamW of its own. A checkpoint holds one of each, so before one is saved they become their
means, too: a run that is resumed equals one that was not stopped, if both save after the same rounds.

Where a replica is lost in an elastic run, the others, if each is one rank, keep what they have made of the round, and
the next generation begins with their exchange: w_k is then their part of the samples that are left.
"""

import argparse
import functools
import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from data_parallel import DataParallelBucket
from pipeline_parallel import run_schedule
from planning.machines import WIRE_DTYPES
from ranks.lost import is_elastic
from run.flags import fraction
from run.samples import SamplesPlugin
from utils import UserError, positive_float, positive_int

COUNTED = ("max_steps", "max_steps_per_epoch", "save_every", "eval_every", "sample_every",
           "check_replicas")  # flags, in optimizer steps
OUTER = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}  # flags and their defaults


def add_local_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--local_steps", type=positive_int, metavar="H",
                        help="optimizer steps that a replica takes by itself between two exchanges: the mean of all")
    parser.add_argument("--outer_learning_rate", type=positive_float, help="of what replicas agree on (default: 1)")
    parser.add_argument("--outer_momentum", type=fraction,
                        help="Nesterov's (default: 0, so that weights are averaged; DiLoCo as published: 0.7 and 0.9)")
    parser.add_argument("--gradient_wire_dtype", choices=WIRE_DTYPES,
                        help="of gradients, or of differences after local steps, while they travel")


def check_local_flags(args) -> None:
    """Fills in defaults, and makes rounds of what is counted in steps. Raises UserError for what does not go together.
    """
    if not args.local_steps:
        if given := [name for name in OUTER if getattr(args, name) is not None]:
            raise UserError(f"--{', --'.join(given)} without local steps: add --local_steps 50, or leave them out")
        return
    for name, default in OUTER.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.plan:
        raise UserError("--plan with --local_steps: a plan is for steps that all machines make together: leave out one "
                        "of them, or give --pipelines")
    if args.num_microbatches and is_elastic():
        raise UserError("--num_microbatches with --local_steps in an elastic run, where machines take other parts when "
                        "hosts come and go: give --batch_size and --gradient_accumulation instead")
    for name in COUNTED:
        rounds, rest = divmod(getattr(args, name) or 0, args.local_steps)
        if rest:
            raise UserError(f"--{name} {getattr(args, name)} is no multiple of --local_steps {args.local_steps}: it "
                            "has to be where a round ends")
        setattr(args, name, rounds or getattr(args, name))
    args.warmup_steps = math.ceil(args.warmup_steps / args.local_steps)


class Made(NamedTuple):
    """What a replica has made of a round: agreed weights minus its own, by name; its mean loss and gradient norm."""

    differences: dict[str, torch.Tensor]
    samples: int
    means: torch.Tensor
    began: float  # time.perf_counter()


class Replica(DataParallelBucket):
    """A stage whose gradients are summed over its own pipeline in local steps, and over all of them by exchange()."""

    require_backward_grad_sync = property(lambda self: False, lambda self, value: None)  # as backward asks and sets it

    def __init__(self, stage, pipelines: list, **options):
        super().__init__(stage, pipelines, **options)
        self.tied, groups = [], []
        if stage.tied:
            params, grid = dict(stage.model.named_parameters()), pgm.process_group_manager
            ends = [module for names in pipelines[0].modules_per_stage for module in names
                    if any(name.startswith(f"{module}.") for name in stage.tied)]
            groups = [grid.group_of({(k, s) for s, names in enumerate(template.modules_per_stage)
                                     if {*names} & {*ends}}) for k, template in enumerate(pipelines)]
            if groups[grid.dp_rank]:
                self.tied = [params[name] for name in stage.tied if name in params and params[name].requires_grad]
                self.tied_group = groups[grid.dp_rank]

    def finish_gradient_sync(self) -> None:
        """After the last backward of a local step: a tied embedding has a part of its gradient on two stages."""
        for param in self.tied:
            dist.all_reduce(param.grad, group=self.tied_group)

    def exchange(self, values: list[tuple[torch.nn.Parameter, torch.Tensor]], is_exact: bool = False) -> None:
        """The sum of each value over all replicas, in place, as the gradient of its parameter. Collective."""
        for param, value in values:
            param.grad = value / (self.tied_group.size() if any(param is each for each in self.tied) else 1)
            if param in self.bucket_of:
                self.bucket_of[param].take(param)
        if not is_exact:
            return super().finish_gradient_sync()
        for bucket in self.buckets:
            dist.all_reduce(bucket.grad_data, group=bucket.process_group)


class LocalAdamW(torch.optim.AdamW):
    """AdamW of the local steps, and SGD with Nesterov momentum of the outer ones, with one state a parameter."""

    def __init__(self, params, outer_learning_rate: float, outer_momentum: float, **options):
        super().__init__(params, **options)
        self.outer_learning_rate, self.outer_momentum = outer_learning_rate, outer_momentum

    def local_step(self) -> None:
        super().step()

    @torch.no_grad()
    def step(self) -> None:
        """Along the outer gradient, as torch.optim.SGD(nesterov=True) does."""
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            gradient, state = param.grad, self.state[param]
            if self.outer_momentum:
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param)
                buffer = state["momentum_buffer"].mul_(self.outer_momentum).add_(gradient)
                gradient = gradient + self.outer_momentum * buffer
            param.sub_(gradient, alpha=self.outer_learning_rate)


class LocalPlugin(SamplesPlugin):
    """A plugin whose steps are rounds: replica k takes `local_steps`[k] steps by itself. `args`: the run's flags."""

    def __init__(self, args, local_steps: list[int], *others):
        super().__init__(*others)
        self.max_grad_norm, self.local_steps, self.replica_class = args.max_grad_norm, local_steps, Replica
        self.has_begun = False
        self.optimizer_class = functools.partial(LocalAdamW, outer_learning_rate=args.outer_learning_rate,
                                                 outer_momentum=args.outer_momentum)

    def execute_pipeline(self, data_iter: Iterator[dict], model: Replica, criterion: Callable,
                         optimizer: LocalAdamW) -> torch.Tensor:
        """A round. Returns the mean loss over its samples; the weights are as before it, and the gradients are the
        outer one. Where that fails, weights are as before it, too. Collective."""
        total, grid = torch.tensor(self.unfinished.samples if self.unfinished else 0), pgm.process_group_manager
        if not self.has_begun:
            dist.all_reduce(total := total.to(self.device))
        self.has_begun, total = True, total.item()
        if total:  # of those that another generation has left; others have nothing
            for _ in range(self.own_num_microbatches):
                next(data_iter)
            made = self.unfinished or Made({name: torch.zeros_like(param) for name, param in trained(model)}, 0,
                                           torch.zeros(2, dtype=torch.float64, device=self.device), 0.0)
        else:
            made, total = self.take_local_steps(data_iter, model, criterion, optimizer), self.global_batch_size
            self.unfinished = made if is_elastic() and self.dp_size == dist.get_world_size() else None
        share = made.samples / total
        model.exchange([(param, made.differences[name] * share) for name, param in trained(model)])
        sums = made.means * share * (grid.tp_rank == 0)
        dist.all_reduce(sums)
        self.grad_norm, self.unfinished = sums[1], None
        return sums[0]

    def take_local_steps(self, data_iter: Iterator[dict], model: Replica, criterion: Callable,
                         optimizer: LocalAdamW) -> Made:
        """Those of this replica. The weights are afterwards as before."""
        grid, named, began = pgm.process_group_manager, trained(model), time.perf_counter()
        steps, before = self.local_steps[grid.dp_rank], [param.detach().clone() for _, param in named]
        counts = [self.own_num_microbatches // steps * (k == grid.dp_rank) for k in range(self.dp_size)]
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)  # loss, gradient norm
        try:
            for _ in range(steps):
                model.zero_grad()
                with torch.autocast(self.device.type, enabled=False):
                    loss = run_schedule(self.schedule, model, data_iter, criterion, counts,
                                        self.communication(model.module.dtype, self.device))
                norm = clip_replica(model.module, self.max_grad_norm)
                optimizer.local_step()
                sums += torch.stack([loss, norm * grid.pp_is_last_stage]).double() / steps
            return Made({name: old - param.detach() for (name, param), old in zip(named, before)},
                        self.train_batch_size, sums, began)
        finally:
            with torch.no_grad():
                for (_, param), old in zip(named, before):
                    param.copy_(old)

    def clip_grad_norm(self, model: Replica, max_norm: float) -> torch.Tensor:
        """The mean gradient norm of the local steps, which are clipped each by itself."""
        return self.grad_norm

    def deal(self, samples: list[int]) -> None:
        """Pipelines that take more samples from the next round on take more local steps, of as many samples as before.
        """
        if hasattr(self, "samples"):
            sizes = [count // steps for count, steps in zip(self.samples, self.local_steps)]
            self.local_steps = [count // size for count, size in zip(samples, sizes)]
        super().deal(samples)

    def before_saving(self, model: Replica, optimizer: LocalAdamW) -> None:
        """AdamW's averages become their means over the replicas, and its count of steps the largest. Collective."""
        states = [(param, optimizer.state[param]) for _, param in trained(model) if "step" in optimizer.state[param]]
        share = self.train_batch_size / self.global_batch_size
        for name in ("exp_avg", "exp_avg_sq"):
            model.exchange([(param, state[name] * share) for param, state in states], is_exact=True)
            for param, state in states:
                state[name].copy_(param.grad)
        steps = torch.tensor(max((state["step"].item() for _, state in states), default=0.0), device=self.device)
        dist.all_reduce(steps, dist.ReduceOp.MAX)
        for _, state in states:
            state["step"].fill_(steps.item())
        model.zero_grad()


def trained(model: Replica) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, param) for name, param in model.module.model.named_parameters() if param.requires_grad]


def clip_replica(stage, max_norm: float) -> torch.Tensor:
    """tensor_parallel.clip_grad_norm, over the ranks of one pipeline. Returns the norm before."""
    grid, model, copied = pgm.process_group_manager, stage.model, stage.tied and stage.tied[1]
    split = {getattr(module, name) for module in model.modules() for name in getattr(module, "tp_dims", ())}
    params = {name: param for name, param in model.named_parameters() if param.grad is not None}
    rows = [torch.linalg.vector_norm(param.grad, dim=-1) for name, param in params.items()
            if name != copied and (grid.tp_rank == 0 or param in split)]
    squares = torch.nn.utils.get_total_norm([*rows, next(model.parameters()).new_zeros(())]) ** 2
    for group in (grid.tp_group, grid.pp_group):
        dist.all_reduce(squares, group=group)
    if max_norm:
        torch.nn.utils.clip_grads_with_norm_(params.values(), max_norm, squares.sqrt())
    return squares.sqrt()
