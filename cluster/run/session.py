"""A training that goes on: from its first step of this generation to its end, what is saved and when it stops.

    session = Session(...)          once plugin.configure has made the stage, and its optimizer has its state
    session.begin()                 there is something to lose from now on
    session.note_commit(...)        a step's gradients are complete, so the step counts
    session.after_step(...)         saves and samples when it is time
    session.take_in()               processes that wait become part of the run: this generation ends
    session.finish(...)             waits for the last checkpoint, without which a run has not succeeded; then all ranks
                                    leave together, with the exit code of the run
"""

import contextlib
import datetime
import os
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from checkpoints.save import Checkpointer
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from hosts import exits
from models.causal import function_of
from models.published import read_tokenizer_files
from ranks.collectives import once, say, wait_for_all
from ranks.lost import NEWCOMER, PATIENCE, MembershipChanged, is_elastic
from ranks.placement import home_rank
from ranks.stopping import StopAgreement
from run.check_replicas import Replicas
from run.evaluation import Sampler
from run.live_state import Commit, LiveState, who_has_what
from run.start import Start
from utils import UserError

WAIT_FOR_AGENT = 4.0  # seconds that a rank waits for its own agent to stop it


class Trained(NamedTuple):
    """What trains on this rank. `model`: its stage, as `plugin`.configure() returned it."""

    plugin: HeterogeneousParallelPlugin
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: object


def description(args, run_id: str, made, global_batch: int, read: dict, lines: list[str]) -> Callable[[int], dict]:
    """What state.json says of the run after a step. It outlives the Session, and refers to nothing of that."""
    names, function = made.names, function_of(made.model)

    def describe(step: int) -> dict:
        return {"tokens": step * global_batch * args.seq_len, "seed": args.seed, "global_batch": global_batch,
                "seq_len": args.seq_len, "names": names, "model": function,
                "flags": {name: value for name, value in vars(args).items() if not callable(value)},
                "topology": pgm.process_group_manager.topology, "run_id": run_id, "data": read,
                "records": "".join(lines)}

    return describe


class Session:
    """All ranks make one together. `live`: what goes on after its generation. `source`: where weights were read from.

    `made`: a Model. `tokenizer`: a name. `read`: of the data, what checkpoints say. `steps_per_epoch`: None where the
    data have no epochs. `lines`: the rows of the run's records so far, see Record.
    """

    def __init__(self, args, start: Start, made, trained: Trained, tokenizer: str, read: dict,
                 steps_per_epoch: int | None):
        self.args, self.start, self.generation, self.trained = args, start, start.generation, trained
        self.steps_per_epoch, self.source = steps_per_epoch, start.found.path if start.found else made.source
        self.members, tp_rank, self.lines = self.generation.members, pgm.process_group_manager.tp_rank, start.lines
        self.stop_agreement = StopAgreement(self.members and self.members.newcomers, self.generation.signals)
        small = {**made.files, **once(home_rank(), lambda: read_tokenizer_files(tokenizer))}
        describe = description(args, start.run_id, made, trained.plugin.global_batch_size, read, self.lines)
        self.checkpointer = Checkpointer(start.disks, trained.model, trained.optimizer, trained.scheduler, describe,
                                         small, args.keep)
        self.sampler = args.sample_every and Sampler(trained.plugin, trained.model, tokenizer, args.prompt,
                                                     args.seq_len)
        max_grad_norm = 0 if args.local_steps else args.max_grad_norm  # local steps are clipped one by one
        self.live = LiveState(self.checkpointer, self.generation.number, tp_rank, max_grad_norm, start.step,
                              start.memory and start.memory.commit)
        if self.members:
            self.live.everything, words = who_has_what(trained.model.module, tp_rank, self.members.me.address)
            say(words)
            if needed := self.members.history.roster.needed_hosts():
                say(f"where {' or '.join(needed)} is lost, too few are left: the run then waits for it")

    def begin(self) -> None:
        """From now on there is something to lose. What is saved nowhere yet is saved. Collective."""
        start = self.start
        self.generation.begin(self.live, self.trained.plugin)
        self.checkpointer.written = start.written
        self.replicas = Replicas(self)
        self.stop_agreement.begin()
        # Whoever is lost next, the run goes on from here. Nobody knows what memory a copy leaves for the first step.
        if start.step > start.written and (not start.memory or self.is_due(start.step, False)):
            self.checkpointer.save(start.step, waits=True)

    def note_commit(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, learning_rate: float) -> None:
        """All gradients of a step are complete on all ranks: from here on it counts, also where a rank is lost."""
        if not (detector := self.generation.failure_detector):
            return
        commit = Commit(step, loss.item(), grad_norm.item(), learning_rate)
        if dist.get_backend() == "nccl" and detector.reason:  # the group was aborted: these are no sums
            raise MembershipChanged(detector.reason)
        self.live.commit = commit

    def take_in(self) -> None:
        """Where processes wait to be taken in, ends this generation: raises MembershipChanged. Collective."""
        if self.stop_agreement.has_newcomers:
            self.checkpointer.wait()
            wait_for_all("ended")
            raise MembershipChanged(NEWCOMER)

    def is_due(self, step: int, stops: bool) -> bool:
        """Whether a checkpoint is saved after this step."""
        every = self.args.save_every or self.steps_per_epoch
        return stops or bool(every) and step % every == 0

    def after_step(self, step: int, stops: bool, is_last: bool) -> str | None:
        """Saves when it is time, and returns a sample of text when it is time for one. Collective."""
        is_due = self.is_due(step, stops or is_last)
        self.replicas.after_step(step, is_due or self.stop_agreement.has_newcomers)
        if is_due:
            self.trained.plugin.before_saving(self.trained.model, self.trained.optimizer)
            self.checkpointer.save(step, waits=stops or is_last)
        self.checkpointer.report()
        return self.sampler.sample() if self.sampler and step % self.args.sample_every == 0 else None

    def finish(self, number: int) -> int:
        """Waits for the last checkpoint, and then for all ranks, which leave together. Returns the exit code.
        Collective.

        `number`: of the signal by which the run was told to stop before its last step, or 0. Raises UserError, on every
        rank, where that checkpoint could not be written: what was trained since the one before is lost.
        """
        # from the last checkpoint on, no rank needs to hear of another one
        self.checkpointer.wait()
        if self.generation.failure_detector:
            if self.checkpointer.is_broken:
                raise MembershipChanged("a rank was lost while the last checkpoint was written")
            self.generation.failure_detector.ended.set()
        saved, step, is_started_anew = self.checkpointer.written, self.live.step, number and is_elastic()
        goes_on = f"goes on {'from there' if saved == step else f'after step {saved}'}" if saved else (
            "begins anew, as no step was saved")
        if saved < step and not is_started_anew:
            raise UserError(f"the last checkpoint, that of step {step}, could not be written to "
                            f"{self.start.disks.folder}: make room there, or move that folder into another "
                            f"--checkpoint_dir. --resume auto then {goes_on}")
        if number and dist.get_rank() == 0:  # before another rank ends, upon which a launcher may end this one
            print(f"stopped after step {step}, as it was told: --resume auto {goes_on}", flush=True)

        # all ranks leave
        with contextlib.suppress(RuntimeError):  # others may have left
            dist.barrier(self.start.disks.group, async_op=True).wait(datetime.timedelta(seconds=PATIENCE))
        if not number:
            if self.members:
                self.members.history.keep(is_done=True)
            return exits.DONE
        if is_started_anew:  # by its agent, unless that ends too, with those that are there
            self.stop_agreement.signals.wait(WAIT_FOR_AGENT)
            os._exit(exits.after(number))
        return exits.after(number)
