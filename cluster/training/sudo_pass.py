"""--sudo_pass VALUE: accepted for compatibility, never needed, and forgotten before anybody sees it.

A command line is public: `ps` shows it to every user of the machine, W&B uploads it, logs repeat it. Only a program
that starts anew without the flag has a process title without it, so that is what drop_password does. It imports next to
nothing: the script calls it before all that is slow or curious.
"""

import os
import re
import sys

WARNING = ("warning: --sudo_pass is ignored, nothing here needs it; never write a password on a command line. "
           "The torchrun that started this still shows it to ps: change that password")


def without_password(arguments: list[str]) -> list[str]:
    """The arguments less --sudo_pass and its value; less misspelt ones, too, whose value an error would print."""
    kept, is_value = [], False
    for argument in arguments:
        is_flag = re.match("-+su", argument) is not None and not is_value
        if not is_flag and not is_value:
            kept.append(argument)
        is_value = is_flag and "=" not in argument
    return kept


def drop_password() -> None:
    """Starts this process anew, under the same id, without the flag; returns where it is not there."""
    arguments = without_password(sys.argv[1:])
    if arguments == sys.argv[1:]:
        return
    if os.environ.get("RANK", "0") == "0":
        print(WARNING, file=sys.stderr, flush=True)
    interpreter = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv[1:])]  # python, its own flags, the script
    os.execv(sys.executable, [sys.executable, *interpreter[1:], *arguments])
