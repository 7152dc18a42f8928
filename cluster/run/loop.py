"""The loop over optimizer steps that all machines make together."""

import atexit
import math
from collections.abc import Callable, Iterator

import torch

import process_group_manager as pgm
from ranks.placement import is_home
from run.evaluation import Evaluator
from run.record import Record, Step
from run.samples import Rebalancer
from run.session import Session
from run.times import StepTimes, write_timeline
from timeline import timeline
from utils import UserError


def check_profile_batch(args, num_steps: int) -> None:
    """Raises UserError for a --profile_batch that is no step."""
    first = args.first_batch
    if not first - 1 <= args.profile_batch < first + num_steps:
        raise UserError(f"--profile_batch {args.profile_batch} is not among the steps {first} to "
                        f"{first + num_steps - 1}: choose one of them, or {first - 1} for none")


def train(session: Session, batches: Iterator[dict], criterion: Callable, num_steps: int, evaluator: Evaluator | None,
          rebalancer: Rebalancer) -> int:
    """Trains until optimizer step `num_steps`. Returns the exit code. Collective.

    `batches`: this pipeline's, without those that were trained before a resume. The evaluator is used before the first
    step, after the last one, and after every args.eval_every ones; where the run is stopped at such a step, when it is
    resumed. Writes metrics, and the timeline of args.profile_batch. In the end rank 0 prints where the
    time of each rank went. Raises UserError for a loss that is not finite.
    """
    grid, args, (plugin, model, optimizer, scheduler) = pgm.process_group_manager, session.args, session.trained
    origin = session.start.origin
    first = origin.step
    record = Record(args, grid, session.start.disks, num_steps, plugin.global_batch_size * args.seq_len,
                    first, session.lines, origin.is_in_memory)
    session.generation.at_end.callback(record.leave)
    atexit.register(record.leave)  # where an error ends the run, its rows are still written, or said to be lost
    if first >= num_steps:
        has_made_all(session, num_steps)
    times, stops, is_last = StepTimes(plugin.device), 0, False
    if evaluator and record.is_evaluation_due(first, args.eval_every):
        record.evaluated(first, evaluator.evaluate())
    for batch in range(first, num_steps):
        record.bar.begin()
        is_profiled = batch + args.first_batch == args.profile_batch
        times.start(batch, is_profiled, plugin.unfinished and plugin.unfinished.began)
        torch.manual_seed(args.seed + 1000 * grid.dp_rank + grid.pp_rank + 1_000_000 * batch)  # of dropout
        loss = plugin.execute_pipeline(batches, model, criterion, optimizer)
        with timeline.span("gradient norm"):
            grad_norm = plugin.clip_grad_norm(model, args.max_grad_norm)
        learning_rate = scheduler.get_last_lr()[0]
        session.note_commit(batch + 1, loss, grad_norm, learning_rate)
        session.replicas.before_update(batch + 1, loss, grad_norm)
        with timeline.span("optimizer"):
            optimizer.step()
        scheduler.step()
        session.step = batch + 1
        step = Step(session.step, loss.item(), grad_norm.item(), learning_rate, times.stop())  # waits for a GPU
        if not math.isfinite(step.loss + step.grad_norm):
            raise UserError(what_went_wrong(step, session))
        record.log(*step)
        if is_profiled:
            write_timeline(args, times.clock, record.writes)
        of_this_rank, is_last = [times.work, *times.used], step.number == num_steps
        stops = session.stop_agreement.agree(step.seconds, of_this_rank)
        record.used(step.number, session.stop_agreement.of_ranks)
        if evaluator and not stops and record.is_evaluation_due(step.number, args.eval_every):
            record.evaluated(step.number, evaluator.evaluate())
            stops = session.stop_agreement.agree(step.seconds, of_this_rank)  # an evaluation may take long
        if (text := session.after_step(step.number, stops, is_last)) is not None:
            record.sampled(step.number, text)
        if stops:
            break
        if not is_last:
            session.take_in()
            rebalancer.follow(session, step.number)
    record.close()
    times.print()
    told = 0 if is_last else stops
    return session.leave(told, session.finish(was_stopped=bool(told)))


def has_made_all(session: Session, num_steps: int) -> None:
    """A run that goes on after its last step. Where a host was lost before that was saved, it is saved now. Collective.
    """
    origin = session.start.origin
    session.checkpointer.save(origin.step, waits=True)
    if is_home() and not origin.is_in_memory:
        print(f"nothing to do: {origin.found.path} is that of step {origin.step}, of {num_steps}", flush=True)


def what_went_wrong(step: Step, session: Session) -> str:
    """Of a step whose loss or gradient norm is not finite, and what is left. Collective."""
    session.checkpointer.wait()
    if step.number == session.start.origin.step + 1:  # no step has changed the weights
        what_next = (f"Nothing was trained yet with the weights that were read from {session.source}: they may be "
                     "damaged, get them anew or take others") if session.source else (
            "Nothing was trained yet, and the weights were drawn at random: look at config.json, rms_norm_eps and "
            "initializer_range for instance, and at --dtype")
    else:
        saved = f"The last good checkpoint is that of step {session.checkpointer.written}"
        what_next = (f"{saved if session.checkpointer.written else 'No checkpoint was saved yet'}. Lower "
                     "--learning_rate, and go on with --resume auto")
    return (f"step {step.number} has the loss {step.loss} and the gradient norm {step.grad_norm}: the training stops, "
            f"and saves nothing. {what_next}")
