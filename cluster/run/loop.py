"""The loop over optimizer steps that all machines make together."""

import atexit
import math
from collections.abc import Callable, Iterator

import torch

import process_group_manager as pgm
from ranks.placement import is_home
from run.evaluation import Evaluator
from run.live_state import Commit
from run.record import Record
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


def train(session: Session, batches: Iterator[dict], criterion: Callable, num_steps: int,
          evaluator: Evaluator | None) -> int:
    """Trains until optimizer step `num_steps`. Returns the exit code. Collective.

    `batches`: this pipeline's, without those that were trained before a resume. The evaluator is used before the first
    step, after the last one, and after every args.eval_every ones; where the run is stopped at such a step, when it is
    resumed. Writes metrics, and the timeline of args.profile_batch. In the end rank 0 prints where the time of each
    rank went. Raises UserError for a loss that is not finite.
    """
    grid, args, (plugin, model, optimizer, scheduler) = pgm.process_group_manager, session.args, session.trained
    start, first = session.start, session.start.step
    record = Record(args, grid, start.disks, num_steps, plugin.global_batch_size * args.seq_len, first, session.lines,
                    start.memory is not None)
    session.generation.at_end.callback(record.leave)
    atexit.register(record.leave)  # where an error ends the run, its rows are still written, or said to be lost
    if first >= num_steps:
        has_made_all(session, num_steps)
    times, stops, is_last = StepTimes(plugin.device), 0, False
    if evaluator and record.is_evaluation_due(first, args.eval_every):
        record.evaluated(first, evaluator.evaluate())
    for batch in range(first, num_steps):
        # gradients of the mean over the global batch; whoever has their norm knows that all of them are complete
        record.bar.begin()
        is_profiled, is_last = batch + args.first_batch == args.profile_batch, batch + 1 == num_steps
        times.start(batch, is_profiled, plugin.unfinished and plugin.unfinished.began)
        torch.manual_seed(args.seed + 1000 * grid.dp_rank + grid.pp_rank + 1_000_000 * batch)  # of dropout
        loss = plugin.execute_pipeline(batches, model, criterion, optimizer)
        with timeline.span("gradient norm"):
            grad_norm = plugin.clip_grad_norm(model, args.max_grad_norm)
        learning_rate = scheduler.get_last_lr()[0]
        session.note_commit(batch + 1, loss, grad_norm, learning_rate)
        session.replicas.before_update(batch + 1, loss, grad_norm)
        # the update
        with timeline.span("optimizer"):
            optimizer.step()
        scheduler.step()
        session.live.step = batch + 1
        # what is told of the step, and whether a rank was told to stop
        made, seconds = Commit(batch + 1, loss.item(), grad_norm.item(), learning_rate), times.stop()  # waits for a GPU
        require_finite(made, session)
        record.log(*made, seconds)
        if is_profiled:
            write_timeline(args, times.clock, record.writes)
        of_this_rank = [times.work, *times.used]
        stops = session.stop_agreement.agree(seconds, of_this_rank)
        record.used(made.step, session.stop_agreement.of_ranks)
        # what is due after it: an evaluation, a checkpoint, a sample of text; then other ranks, or other samples
        if evaluator and not stops and record.is_evaluation_due(made.step, args.eval_every):
            record.evaluated(made.step, evaluator.evaluate())
            stops = session.stop_agreement.agree(seconds, of_this_rank)  # an evaluation may take long
        if (text := session.after_step(made.step, stops, is_last)) is not None:
            record.sampled(made.step, text)
        if stops:
            break
        if not is_last:
            session.take_in()
            plugin.rebalance(args, made.step, session.stop_agreement)
    record.close()
    times.print()
    return session.finish(0 if is_last else stops)


def has_made_all(session: Session, num_steps: int) -> None:
    """A run that goes on after its last step. Where a host was lost before that was saved, it is saved now. Collective.
    """
    start = session.start
    session.checkpointer.save(start.step, waits=True)
    if is_home() and not start.memory:
        print(f"nothing to do: {start.found.path} is that of step {start.step}, of {num_steps}", flush=True)


def require_finite(made: Commit, session: Session) -> None:
    """Raises UserError for a step whose loss or gradient norm is not finite, with what is left. Collective."""
    if math.isfinite(made.loss + made.grad_norm):
        return
    session.checkpointer.wait()
    if made.step == session.start.step + 1:  # no step has changed the weights
        what_next = (f"Nothing was trained yet with the weights that were read from {session.source}: they may be "
                     "damaged, get them anew or take others") if session.source else (
            "Nothing was trained yet, and the weights were drawn at random: look at config.json, rms_norm_eps and "
            "initializer_range for instance, and at --dtype")
    else:
        saved = f"The last good checkpoint is that of step {session.checkpointer.written}"
        what_next = (f"{saved if session.checkpointer.written else 'No checkpoint was saved yet'}. Lower "
                     "--learning_rate, and go on with --resume auto")
    raise UserError(f"step {made.step} has the loss {made.loss} and the gradient norm {made.grad_norm}: the training "
                    f"stops, and saves nothing. {what_next}")
