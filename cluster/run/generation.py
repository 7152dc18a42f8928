"""A run that goes on in place: one generation of its processes after the other, in the same processes.

    train_in_generations(args, train)     calls train(args, generation) until it returns
        generation.join(backend)          meets the others, and makes the groups' store and the first group
        ...                               the whole training; every group of ranks belongs to this generation
        MembershipChanged, group errors   its groups end, and the next one is given what this process holds

So a lost process costs no start of any other one: no imports, no process, no reading of what is in memory. On NCCL,
groups are aborted as its documentation says; that was never run.
"""

import argparse
import atexit
import contextlib
import copy
import datetime
import functools
import gc
import json
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

import process_group_manager as pgm
from checkpoints.save import WRITER
from hosts import exits
from membership.failure_detector import FailureDetector
from membership.rendezvous import Members
from pipeline_template import names_of
from ranks.collectives import default_store
from ranks.lost import LOST, NEWCOMER, VARIABLE, is_elastic, is_lost_peer, is_of_this_machine
from ranks.placement import forget_ranks
from ranks.stopping import Signals, let_signals_kill
from run.check_replicas import ReplicasDiffer
from run.live_state import LiveState
from timeline import timeline
from utils import UserError

OF_RANK = r"rank (?!{}:)\d+: "  # how the message of another rank than this one begins, see pgm.together
JOINING, TIMEOUT = 15, 600  # seconds that a process waits for the others: to join, and after that
FAILURES = 5  # generations that may end before they begin, one after the other


class Generation:
    """`live`: what this process holds: that of the generation before, until this one's Session begins; None of a new
    process. `has_state`: it held the run's state when this one began. `at_end`: what is closed when this one ends.
    """

    def __init__(self, members: Members | None, signals: Signals, live: LiveState | None = None):
        self.members, self.signals, self.live, self.has_state = members, signals, live, live is not None
        self.failure_detector, self.first_step, self.at_end = None, None, contextlib.ExitStack()

    @property
    def number(self) -> int:
        return self.members.history.roster.generation if self.members else 0

    @property
    def has_made_steps(self) -> bool:
        return self.first_step is not None and self.live.step > self.first_step

    @property
    def is_needed(self) -> bool:
        """Whether others may need this process. A run that was under way goes on without one that has just come."""
        return self.has_state or not self.members or not self.members.contacts.found_running

    def join(self, backend: str, flags: dict) -> None:
        """Meets the other processes. Raises UserError, MembershipChanged."""
        if self.members:
            roster = self.members.meet(lambda: self.signals.asked)
            hosts = list(dict.fromkeys(member.host for member in roster.members))
            address, port = roster.store
            os.environ |= {"RANK": str(roster.members.index(self.members.me)), "WORLD_SIZE": str(len(roster.members)),
                           "MASTER_ADDR": address, "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": str(len(hosts)),
                           "GROUP_RANK": str(hosts.index(self.members.me.host)),
                           "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is there already
                           "TORCHELASTIC_RESTART_COUNT": roster.secret}  # becomes the prefix of its keys
            self.failure_detector = FailureDetector(self.members)
        pgm.init_process_group(backend, JOINING if self.members else TIMEOUT, None if self.members else flags)
        if self.members:
            dist.barrier()
            self.members.begin(roster)
            pgm.timeout = datetime.timedelta(seconds=TIMEOUT)  # from here on machines may be slow
            with names_of("torch"):
                dist.distributed_c10d._set_pg_timeout(pgm.timeout)
            default_store().set_timeout(pgm.timeout)

    def forget(self) -> None:
        """What this process holds is not the run's state any more."""
        self.live, self.has_state = None, False

    def begin(self, live: LiveState, plugin) -> None:
        """This is the state of training from now on, and what goes on when this generation ends."""
        self.live, self.first_step = live, live.step
        self.at_end.callback(live.release, plugin)

    def is_broken_by(self, error: RuntimeError) -> bool:
        """Whether a rank is lost or comes, so that the next generation may go on. Always False where there is none."""
        is_lost = is_lost_peer(error) or self.failure_detector is not None and self.failure_detector.reason
        of_another_rank = re.match(OF_RANK.format(os.environ.get("RANK")), str(error))
        is_short_elsewhere = isinstance(error, torch.OutOfMemoryError) and of_another_rank
        return self.members is not None and bool(is_lost or is_short_elsewhere)

    def end(self, error: Exception) -> str:
        """Ends all that belongs to this generation: what waits in a group, then the groups themselves. Returns why."""
        if (detector := self.failure_detector) and str(error) != NEWCOMER:
            detector.noticed.wait(0.2)  # whose end it was
        reason = detector and detector.reason or str(error).splitlines()[0][:200]
        if self.first_step is not None:
            print(f"rank {os.environ['RANK']}: {reason}, after step {self.live.step}", flush=True)
        if detector:
            detector.shut()
            detector.close()
        for thread in threading.enumerate():  # those that wait in a group: of the timeline, of a checkpoint
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join(JOINING)
        self.at_end.close()
        timeline.recording, timeline.spans = False, []
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        forget_ranks()
        return reason


def train_in_generations(args: argparse.Namespace, train: Callable) -> int:
    """What train(args, generation) returns, which is called again and again in an elastic run, each time with the same
    `args`."""
    folder = os.path.join(os.path.abspath(args.checkpoint_dir), args.run_name)
    exits.outlive_a_full_disk(sys.stdout, sys.stderr)
    logging.raiseExceptions = False  # in which W&B's own log on a full disk would print a traceback a line
    members, signals = Members.from_environment(os.path.join(folder, ".members"), args.tp_size), Signals()
    if members and members.history.is_done:
        print("the run has ended already", flush=True)
        return exits.DONE
    live, failures = None, 0  # what goes on; generations that have ended before they made a step, in a row
    while failures <= FAILURES or live:
        generation, live = Generation(members, signals, live), None  # held once: it may be too large for twice
        try:
            return train(copy.deepcopy(args), generation)
        except ReplicasDiffer:
            raise
        except UserError as error:
            if not generation.is_needed:
                print(f"error: {error}", flush=True)
                os._exit(exits.OF_THIS_MACHINE)
            if not generation.has_state or generation.has_made_steps or failures >= FAILURES:
                raise  # it came of the training, or goes on for ever
            if os.environ["RANK"] == "0":  # of another process, as one with a full disk that has just come
                print(f"this generation can't begin ({error}): the run goes on with those that can", flush=True)
            reason = generation.end(error)
        except RuntimeError as error:
            if not generation.is_broken_by(error):
                raise
            reason = generation.end(error)
        live, failures = generation.live, 0 if generation.has_made_steps else failures + 1
        gc.collect()  # groups and stages of that generation refer to each other
    # who holds nothing need not stand in the way of others
    print(f"no generation has begun with this process, {failures} times in a row, the last time because {reason}: it "
          "starts anew. Can each host reach each other one at all ports?", flush=True)
    os._exit(exits.FAILED)


@contextlib.contextmanager
def end_of_elastic_run():
    """Around main(): an error that all ranks would meet anew ends the agent as well, which started this process, and
    with it the run. One that this machine alone has costs only this machine.

    Our own agent reads it from the exit code; torchrun's is told.
    """
    if VARIABLE in os.environ:  # until it has met the others: see one_clear_error
        os.environ["RANK"] = str(json.loads(os.environ[VARIABLE])["host"])
    try:
        yield
    except Exception as error:
        for thread in threading.enumerate():
            if thread.name == WRITER:  # it may wait for a rank whose connections nobody closes, after a power cut
                thread.join(JOINING)
        if not is_elastic():
            let_signals_kill()  # a rank that waits for rank 0 to speak ends where it is told to
        elif is_of_this_machine(error):
            if VARIABLE in os.environ:
                traceback.print_exc()
                os._exit(exits.OF_THIS_MACHINE)
        elif isinstance(error, UserError) or not LOST.search(str(error)):
            if "TORCHELASTIC_ERROR_FILE" in os.environ:  # a child of torchrun
                tell = functools.partial(os.kill, os.getppid(), signal.SIGTERM)  # after rank 0's message
                atexit.register(tell) if os.environ.get("RANK") == "0" else threading.Timer(1.0, tell).start()
            elif VARIABLE in os.environ and not isinstance(error, UserError):
                traceback.print_exc()
                os._exit(exits.USER_ERROR)
        raise
