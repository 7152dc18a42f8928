"""A training that goes on: from its first step of this generation to its end, what is saved and when it stops.

    session = Session(...)          once plugin.configure has made the stage, and its optimizer has its state
    session.begin()                 there is something to lose from now on
    session.note_commit(...)        a step's gradients are complete, so the step counts
    session.after_step(...)         saves and samples when it is time
    session.take_in()               processes that wait become part of the run: this generation ends
    session.finish(...)             waits for the last checkpoint, without which a run has not succeeded
    session.leave(...)              all ranks leave together, with the exit code of the run
"""

import contextlib
import datetime
import os
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from checkpoints.save import Checkpointer
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from hosts import exits
from models.causal import function_of
from models.published import read_tokenizer_files
from ranks.collectives import say, wait_for_all
from ranks.lost import NEWCOMER, PATIENCE, MembershipChanged, is_elastic
from ranks.placement import from_home
from ranks.stopping import StopAgreement
from run.check_replicas import Replicas
from run.evaluation import Sampler
from run.live_state import Commit, who_has_what
from run.start import Start
from utils import UserError

WAIT_FOR_AGENT = 4.0  # seconds that a rank waits for its own agent to stop it


class Trained(NamedTuple):
    """What trains on this rank. `model`: its stage, as `plugin`.configure() returned it."""

    plugin: HeterogeneousParallelPlugin
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: object


class Session:
    """All ranks make one together. `step`: the last one that was made. `source`: where the weights were read from.

    `made`: a Model. `tokenizer`: a name. `read`: of the data, what checkpoints say. `steps_per_epoch`: None where the
    data have no epochs. `lines`: the rows of the run's records so far, see Record.
    """

    def __init__(self, args, start: Start, generation, made, trained: Trained, tokenizer: str, read: dict,
                 steps_per_epoch: int | None):
        self.args, self.start, self.generation, self.trained = args, start, generation, trained
        self.names, self.function, self.read, self.steps_per_epoch = (
            made.names, function_of(made.model), read, steps_per_epoch)
        self.global_batch = trained.plugin.global_batch_size
        self.source = start.origin.found.path if start.origin.found else made.source
        self.step, self.commit, self.lines = start.origin.step, start.origin.commit, start.origin.lines
        self.tp_rank, stage = pgm.process_group_manager.tp_rank, trained.model.module
        self.stop_agreement = StopAgreement(generation.members and generation.members.newcomers, generation.signals)
        small = {**made.files, **from_home(lambda: read_tokenizer_files(tokenizer))}
        self.checkpointer = Checkpointer(start.folder, start.disks, trained.model, trained.optimizer, trained.scheduler,
                                         self.describe, small, args.keep)
        self.sampler = args.sample_every and Sampler(trained.plugin, trained.model, tokenizer, args.prompt,
                                                     args.seq_len)
        if members := generation.members:
            self.everything, words = who_has_what(stage, self.tp_rank, members.me.address)
            say(words)
            if needed := members.history.roster.needed_hosts():
                say(f"where {' or '.join(needed)} is lost, too few are left: the run then waits for it")

    def describe(self, step: int) -> dict:
        """What state.json says of the run after a step."""
        args, batch = self.args, self.global_batch
        return {"tokens": step * batch * args.seq_len, "seed": args.seed,
                "global_batch": batch, "seq_len": args.seq_len, "names": self.names, "model": self.function,
                "flags": {name: value for name, value in vars(args).items() if not callable(value)},
                "topology": pgm.process_group_manager.topology, "run_id": self.start.run_id, "data": self.read,
                "records": "".join(self.lines)}

    def begin(self) -> None:
        """From now on there is something to lose. What is saved nowhere yet is saved. Collective."""
        origin = self.start.origin
        self.checkpointer.written = origin.written
        self.replicas = Replicas(self)
        self.stop_agreement.begin()
        # Whoever is lost next, the run goes on from here. Nobody knows what memory a copy leaves for the first step.
        if origin.step > origin.written and (not origin.is_in_memory or self.is_due(origin.step, False)):
            self.checkpointer.save(origin.step, waits=True)

    def note_commit(self, step: int, loss: torch.Tensor, grad_norm: torch.Tensor, learning_rate: float) -> None:
        """All gradients of a step are complete on all ranks: from here on it counts, also where a rank is lost."""
        if not (detector := self.generation.failure_detector):
            return
        commit = Commit(step, loss.item(), grad_norm.item(), learning_rate)
        if dist.get_backend() == "nccl" and detector.reason:  # the group was aborted: these are no sums
            raise MembershipChanged(detector.reason)
        self.commit = commit

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

    def finish(self, was_stopped: bool) -> str:
        """Waits for the last checkpoint. From then on no rank needs to hear of another one. Collective.

        Returns what --resume auto does from there. Raises UserError, on every rank, where that checkpoint could not be
        written: what was trained since the one before is lost.
        """
        self.checkpointer.wait()
        if self.generation.failure_detector:
            if self.checkpointer.is_broken:
                raise MembershipChanged("a rank was lost while the last checkpoint was written")
            self.generation.failure_detector.ended.set()
        saved = self.checkpointer.written
        goes_on = f"goes on {'from there' if saved == self.step else f'after step {saved}'}" if saved else (
            "begins anew, as no step was saved")
        if saved < self.step and not (was_stopped and is_elastic()):  # which is started anew
            raise UserError(f"the last checkpoint, that of step {self.step}, could not be written to "
                            f"{self.start.folder}: make room there, or move that folder into another --checkpoint_dir. "
                            f"--resume auto then {goes_on}")
        return goes_on

    def leave(self, number: int, goes_on: str) -> int:
        """All ranks have finished, and leave together. Returns the exit code. Collective.

        `number`: of the signal by which the run was told to stop before its last step, or 0.
        """
        if number and dist.get_rank() == 0:  # before another rank ends, upon which a launcher may end this one
            print(f"stopped after step {self.step}, as it was told: --resume auto {goes_on}", flush=True)
        with contextlib.suppress(RuntimeError):  # others may have left
            dist.barrier(self.start.disks.group, async_op=True).wait(datetime.timedelta(seconds=PATIENCE))
        if not number:
            if self.generation.members:
                self.generation.members.history.keep(is_done=True)
            return exits.DONE
        if is_elastic():  # its agent, unless it ends too, starts this process anew, with those that are there
            self.stop_agreement.signals.wait(WAIT_FOR_AGENT)
            os._exit(exits.after(number))
        return exits.after(number)
