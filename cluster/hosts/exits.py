"""Exit codes of cluster/, and how a process ends with one, whatever becomes of its output. Standard library only:
parts of this run on hosts.

    DONE              all that was asked for is made; an agent ends with it when all of its processes have
    FAILED            a fault. The agent of an elastic run starts that process anew; another launcher ends the run
    USER_ERROR        a mistake in how it was started: the agent ends with it, and with that the run
    OF_THIS_MACHINE   what this machine alone lacks, as memory or a disk with room: the agent starts it anew, and gives
                      up where it has taken part for a while, too. So it does where a process was KILLED
    UNHEARD           of a part: its launcher was not heard for a while. An elastic run takes its host in again
    NO_PART           of a look at a part: no part of the run is there
    128 + n           signal n has ended it, or told it to stop before all was made, as KILLED and STOPPED: an agent
                      starts it anew; of a host's part, the launcher takes the host as lost
"""

import atexit
import contextlib
import errno
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

DONE, FAILED, USER_ERROR, OF_THIS_MACHINE = 0, 1, 2, 3
UNHEARD, NO_PART = 75, 76
OF_A_FULL_DISK = errno.ENOSPC, errno.EDQUOT


def after(number: int) -> int:
    """Of a process that signal `number` has ended, as a shell gives it."""
    return 128 + number


def as_shell(returncode: int) -> int:
    """A Popen's returncode as a shell gives it."""
    return returncode if returncode >= 0 else after(-returncode)


KILLED, STOPPED = after(signal.SIGKILL), after(signal.SIGTERM)


def leave(code: int) -> NoReturn:
    """Ends this process as one_clear_error ends one that has succeeded: in Python's own way to end, threads of gloo
    that still release tensors would abort it."""
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def outlive_a_full_disk(*streams) -> None:
    """From now on these, as sys.stdout, leave out what a disk does not take, instead of raising OSError."""

    def without_errors(method: Callable) -> Callable:
        def call(*args):
            try:
                return method(*args)
            except OSError as error:  # a pipe that nobody reads any more is another matter
                if error.errno not in OF_A_FULL_DISK:
                    raise
        return call

    for stream in streams:
        stream.write, stream.flush = without_errors(stream.write), without_errors(stream.flush)


def ending(code: int) -> str:
    """What is said of a part that has ended with it."""
    return {KILLED: "was killed", STOPPED: "was stopped"}.get(code, f"has ended with code {code}")
