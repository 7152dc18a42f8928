"""A run that goes on in place: one generation of its processes after the other, in the same processes.

    train_in_generations(args, train)     calls train(args, generation) until it returns
        generation.join(backend)          meets the others, and makes the groups' store and the first group
        ...                               the whole training; every group of ranks belongs to this generation
        MembershipChanged, group errors   what this process holds is kept, and the next generation is given it

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
from ranks.lost import LOST, NEWCOMER, VARIABLE, MembershipChanged, is_elastic, is_lost_peer, is_of_this_machine
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
    """`held`: what this process has in memory of the generation before, a LiveState, until this one's Session begins;
    None of a new process. `failures`: of the generations before, so many in a row have ended before they began.
    `at_end`: what is closed when this one ends. `has_state`: this process held the run's state when it began.
    """

    def __init__(self, members: Members | None, signals: Signals, held=None, failures: int = 0):
        self.members, self.signals, self.held, self.failures = members, signals, held, failures
        self.has_state = held is not None
        self.failure_detector, self.session, self.at_end = None, None, contextlib.ExitStack()

    @property
    def number(self) -> int:
        return self.members.history.roster.generation if self.members else 0

    @property
    def has_made_steps(self) -> bool:
        return self.session is not None and self.session.step > self.session.start.origin.step

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
        self.held, self.has_state = None, False

    def begin(self, session) -> None:
        """The Session holds the state of training from now on."""
        self.session, self.held = session, None

    def leave(self, error: RuntimeError) -> "Generation | int":
        """The next generation, with what this process holds, or the exit code with which it ends. Raises the error
        itself where nobody is lost, and in a run that does not go on in place."""
        is_lost = is_lost_peer(error) or self.failure_detector is not None and self.failure_detector.reason
        if not is_lost or self.members is None:
            raise error
        if self.failure_detector and str(error) != NEWCOMER:
            self.failure_detector.noticed.wait(0.2)  # whose end it was
        reason = self.failure_detector and self.failure_detector.reason or str(error).splitlines()[0][:200]
        if self.session:
            print(f"rank {os.environ['RANK']}: {reason}, after step {self.session.step}", flush=True)
            self.held = LiveState(self.session)
        self.end_groups()
        if self.failures > FAILURES and self.held is None:  # who holds nothing need not stand in the way of others
            print(f"no generation has begun with this process, {self.failures} times in a row, the last time because "
                  f"{reason}: it starts anew. Can each host reach each other one at all ports?", flush=True)
            return exits.FAILED
        gc.collect()  # groups and stages of this generation refer to each other
        return Generation(self.members, self.signals, self.held, 0 if self.has_made_steps else self.failures + 1)

    def outlives(self, error: UserError) -> "Generation | int":
        """The next generation where another process has brought the error, as one with a full disk that has just come;
        on that one, which nobody needs, an exit code. Raises the error itself where that would not help.
        """
        if isinstance(error, ReplicasDiffer):
            raise error
        if self.members and self.members.contacts.found_running and not self.has_state:
            print(f"error: {error}", flush=True)
            return exits.OF_THIS_MACHINE
        if not self.has_state or self.has_made_steps or self.failures >= FAILURES:
            raise error
        if os.environ["RANK"] == "0":
            print(f"this generation can't begin ({error}): the run goes on with those that can", flush=True)
        return self.leave(MembershipChanged(str(error)))

    def end_groups(self) -> None:
        """Ends all that belongs to this generation: what waits in a group, then the groups themselves."""
        if self.failure_detector:
            self.failure_detector.shut()
            self.failure_detector.close()
        for thread in threading.enumerate():  # those that wait in a group: of the timeline, of a checkpoint
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join(JOINING)
        self.at_end.close()
        timeline.recording, timeline.spans = False, []
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        forget_ranks()


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
    generation = Generation(members, signals)
    while isinstance(generation, Generation):
        try:
            return train(copy.deepcopy(args), generation)
        except UserError as error:
            generation = generation.outlives(error)
        except RuntimeError as error:
            is_anothers = isinstance(error, torch.OutOfMemoryError) and re.match(OF_RANK.format(os.environ["RANK"]),
                                                                                 str(error))
            generation = generation.leave(MembershipChanged(str(error)) if is_anothers else error)
    os._exit(generation)


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
