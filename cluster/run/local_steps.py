"""Local steps (DiLoCo, Douillard et al. 2023): each rank trains by itself, and all agree on their weights once a round.

A round, from weights that are the same on all ranks:

    rank i   takes n_i optimizer steps of its own, with its own AdamW, and sends nothing
    all      outer gradient = sum over i of w_i * (agreed weights - weights of rank i), summed in small messages
    all      agreed weights: one step of SGD with Nesterov momentum, along the outer gradient; all go on from there

n_i goes by speed, so that all ranks are done at the same time; --local_steps is their mean. The difference of a rank
is the sum of its n_i updates, so w_i must not grow with n_i again. It goes by the micro-batches of one local step, and
every sample counts once.

With --overlap_steps d, ranks go on with the next round while their differences travel. After d of its steps (or d times
n_i / mean, rounded up) a rank waits for the outer gradient and takes the outer step. What it has learned since the
round ended is kept: weights = agreed weights + (weights - weights at the round's end). Streaming DiLoCo (Douillard et
al. 2025) overlaps likewise, and takes a mean of the two. The place is fixed, so the network's speed changes no result.
The last round of an epoch is not overlapped: all ranks end it with the same weights.
"""

import argparse
import datetime
import math
import types
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import process_group_manager as pgm
from data.batches import Data
from model import cast_weights_once
from pipeline_stage import PipelineStage
from planning.machines import WIRE_DTYPES
from ranks.lost import is_elastic
from ranks.stopping import let_signals_kill
from run.compression import CompressedAllReduce
from run.flags import fraction, make_adamw
from run.loop import print_epochs
from run.record import Record, Step
from run.session import Session, Trained
from run.times import StepTimes
from timeline import timeline
from utils import UserError, make_scheduler, positive_float, positive_int, recompute_layers, zero_or_more

OUTER = {"outer_learning_rate": 1.0, "outer_momentum": 0.0, "overlap_steps": 0}  # flags and their defaults
ROUND_TIMEOUT = datetime.timedelta(days=1)  # a round takes long, and ranks may end it at unlike times


def add_local_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--local_steps", type=positive_int, metavar="H",
                        help="optimizer steps that a rank takes by itself between two exchanges: the mean over ranks")
    parser.add_argument("--outer_learning_rate", type=positive_float, help="of what ranks agree on (default: 1)")
    parser.add_argument("--outer_momentum", type=fraction,
                        help="Nesterov's (default: 0, so that weights are averaged; DiLoCo as published: 0.7 and 0.9)")
    parser.add_argument("--overlap_steps", type=zero_or_more,
                        help="go on for so many local steps while the differences travel (default: 0)")
    parser.add_argument("--gradient_wire_dtype", choices=WIRE_DTYPES,
                        help="of gradients, or of differences after local steps, while they travel")


def check_local_flags(args) -> None:
    """Fills in defaults. Raises UserError for flags that do not go together."""
    if not args.local_steps:
        if given := [name for name in OUTER if getattr(args, name) is not None]:
            raise UserError(f"--{', --'.join(given)} without local steps: add --local_steps 50, or leave them out")
        return
    for name, default in OUTER.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    args.packing = args.packing if args.packing == "off" else "text"
    if args.overlap_steps >= args.local_steps:
        raise UserError(f"--overlap_steps {args.overlap_steps} must be below --local_steps {args.local_steps}: the "
                        "differences of a round have to arrive before the next round ends")
    if given := [flag for flag in ("pipelines", "plan", "resume", "save_every", "max_steps", "lora_rank")
                 if getattr(args, flag, None)] + ["tp_size"] * (args.tp_size > 1):
        raise UserError(f"--{', --'.join(given)} with --local_steps: ranks that take local steps hold the whole model, "
                        "from the first epoch on, and save it at the end of each: leave it out")
    if is_elastic():
        raise UserError("--local_steps in an elastic run: ranks that take local steps can't go on from a checkpoint "
                        "when a host is lost or comes back: start without --elastic (torchrun: without "
                        "--max-restarts), or leave out --local_steps")
    if args.profile_batch:
        raise UserError(f"--profile_batch {args.profile_batch}: ranks that take local steps have no step in common to "
                        "draw: leave it out, or leave out --local_steps")
    if args.max_steps_per_epoch and args.max_steps_per_epoch % args.local_steps:
        raise UserError(f"--max_steps_per_epoch {args.max_steps_per_epoch} is no multiple of --local_steps "
                        f"{args.local_steps}: an epoch has to end where a round ends")


def train_rounds(args, plugin, made, layout, start, generation) -> None:
    """The training of train_distributed.py with --local_steps. A round is a step of the run's records, and at the end
    of each epoch rank 0 saves. Collective."""
    data = Data(args, args.model_name, made.model.config.vocab_size, plugin.global_batch_size, None,
                args.max_steps_per_epoch and args.max_steps_per_epoch // args.local_steps)
    rounds_per_epoch = data.train.steps_per_epoch
    num_rounds = args.epochs * rounds_per_epoch
    data.train.set_steps(num_rounds)
    stage = PipelineStage(made.model, layout.templates[0], 0)
    with pgm.together():
        if made.initial:  # else the model has them, drawn by --seed
            made.initial(stage)
        stage.model.to(plugin.device)
    if args.recompute:
        recompute_layers(stage.own_layers())
    optimizer = make_adamw(args, stage.model.named_parameters())
    start.clear_folder()
    trained = Trained(plugin, types.SimpleNamespace(module=stage), optimizer, types.SimpleNamespace(state_dict=dict))
    session = Session(args, start, generation, made, None, trained, args.model_name, data.read, rounds_per_epoch)
    let_signals_kill()
    record = Record(args, pgm.process_group_manager, start.disks, plugin.device, num_rounds,
                    plugin.global_batch_size * args.seq_len, 0, {})
    rounds = train_locally(args, plugin, stage.model, optimizer, plugin.batches(data.train, data.collate),
                           made.criterion, layout.local_steps, rounds_per_epoch)
    for step in print_epochs(map(record.write, rounds), rounds_per_epoch):
        session.step = step.number
        if step.number % rounds_per_epoch == 0:
            session.checkpointer.save(step.number, is_last=True)
    record.close()
    session.end(was_stopped=False)


class OuterOptimizer:
    """The agreed weights and their optimizer. All ranks make one together, and call start() and finish() in turns.

    `share`: of this rank's difference in the outer gradient. Parameters of `model` become views of one flat tensor.
    """

    def __init__(self, args, plugin, model: torch.nn.Module, share: float):
        self.share = share
        self.share_of_samples = plugin.own_num_microbatches / sum(plugin.num_microbatches)
        self.weights = parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(self.weights, model.parameters())
        self.agreed = self.weights.clone()
        self.wire_dtype = WIRE_DTYPES.get(args.gradient_wire_dtype, self.weights.dtype)
        self.optimizer = torch.optim.SGD([self.agreed], args.outer_learning_rate, args.outer_momentum,
                                         nesterov=args.outer_momentum > 0)
        self.group, self.under_way = dist.new_group(timeout=ROUND_TIMEOUT), None

    def start(self, number: int, rows: list[tuple], spent: list[tuple]) -> None:
        """The difference of this rank begins to travel, with the mean of the `rows` of its local steps in round
        `number`. `spent`: what times.stop() returns for each of them; the last one is added while they travel."""
        self.at_end, mean = self.weights.clone(), torch.tensor(rows, dtype=torch.float64).mean(0)  # (3)
        mean = (mean * self.share_of_samples).to(self.weights.device)
        self.under_way = number, mean, spent
        self.mean_arrives = dist.all_reduce(mean, group=self.group, async_op=True)
        self.agreed.grad = (self.agreed - self.weights) * self.share
        self.sum, self.is_gathering = CompressedAllReduce(self.agreed.grad, self.group, self.wire_dtype), False

    def advance(self) -> None:
        """Starts the second half of the sum once the first is there. No result depends on when."""
        if self.under_way and not self.is_gathering and self.sum.handle.is_completed():
            self.sum.gather()
            self.is_gathering = True

    def finish(self) -> tuple[int, torch.Tensor, list[tuple]]:
        """Waits for the outer gradient, and takes the outer step. Returns the round that has ended with it: its number,
        the mean over all ranks' local steps, and what this rank has spent."""
        if not self.is_gathering:
            self.sum.gather()
        self.sum.wait()
        self.mean_arrives.wait()
        self.optimizer.step()
        self.weights.copy_(self.agreed + (self.weights - self.at_end))  # equal on all ranks, if nothing came after
        ended, self.under_way, self.sum, self.at_end, self.agreed.grad = self.under_way, None, None, None, None
        return ended


def local_step(args, model, optimizer, scheduler, batches: Iterator[dict], num_microbatches: int,
               criterion: Callable) -> tuple[float, float, float]:
    """An optimizer step of this rank alone: its loss, gradient norm and learning rate."""
    total = 0.0
    with cast_weights_once():
        for i in range(num_microbatches):
            batch = next(batches)
            with timeline.span("forward", i):
                loss = criterion(model(batch["input_ids"]), batch) / num_microbatches
            with timeline.span("backward", i):
                loss.backward()
            total += loss.detach()
    grad_norm = clip_grad_norm_(model.parameters(), args.max_grad_norm or math.inf)
    with timeline.span("optimizer"):
        optimizer.step()
    optimizer.zero_grad()
    learning_rate = scheduler.get_last_lr()[0]
    scheduler.step()
    return total.item(), grad_norm.item(), learning_rate


def as_step(number: int, mean: torch.Tensor, spent: list[tuple]) -> Step:
    """A round as the records have it."""
    seconds, computed = zip(*spent)
    return Step(number, *mean.tolist(), sum(seconds), None if None in computed else sum(computed))


def train_locally(args, plugin, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[dict],
                  criterion: Callable, steps: list[int], rounds_per_epoch: int) -> Iterator[Step]:
    """Trains `model`, whole on each rank, in rounds of steps[i] local steps on rank i. Collective.

    Yields each round as one step, when its outer step is done: its loss, gradient norm and learning rate are means over
    the local steps of all ranks. Where an epoch ends, all ranks have the same weights.
    """
    rank, times = pgm.process_group_manager.dp_rank, StepTimes(plugin.device)
    num_rounds = args.epochs * rounds_per_epoch
    num_microbatches = [count // own for count, own in zip(plugin.num_microbatches, steps)]  # of a local step
    own, pace = steps[rank], steps[rank] / args.local_steps
    outer = OuterOptimizer(args, plugin, model, num_microbatches[rank] / sum(num_microbatches))
    delay = min(math.ceil(args.overlap_steps * pace), own - 1)
    scheduler = make_scheduler(optimizer, num_rounds * own, round(args.warmup_steps * pace), args.lr_decay)
    for number in range(1, num_rounds + 1):
        rows, spent, ended = [], [], None
        is_overlapped = args.overlap_steps > 0 and number % rounds_per_epoch > 0
        for step in range(own):
            times.start((number - 1) * own + step)
            if outer.under_way and step == delay:
                yield as_step(*outer.finish())
            rows.append(local_step(args, model, optimizer, scheduler, batches, num_microbatches[rank], criterion))
            outer.advance()
            if step == own - 1:
                outer.start(number, rows, spent)
                ended = None if is_overlapped else outer.finish()
            spent.append(times.stop())
        if ended:
            yield as_step(*ended)
    times.print()
