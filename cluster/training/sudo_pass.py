"""--sudo_pass VALUE: accepted for compatibility, never needed, and forgotten before anybody sees it.

A command line is public: `ps` shows it, W&B uploads it, logs repeat it. Only a program that starts anew without the
flag has a process title without it, so a script calls drop_password() before all that is slow.
"""

import os
import sys

WARNING = ("warning: --sudo_pass is ignored, nothing here needs it; never write a password on a command line. "
           "The torchrun that started this still shows it to ps: change that password")


def drop_password() -> None:
    """Starts this process anew, under the same id, without the flag; returns where it is not there."""
    kept, is_value = [], False
    for argument in sys.argv[1:]:
        is_flag = not is_value and argument.partition("=")[0] == "--sudo_pass"
        if not is_flag and not is_value:
            kept.append(argument)
        is_value = is_flag and "=" not in argument
    if kept == sys.argv[1:]:
        return
    if os.environ.get("RANK", "0") == "0":
        print(WARNING, file=sys.stderr, flush=True)
    script = sys.orig_argv[1:len(sys.orig_argv) - len(sys.argv[1:])]  # Python's own flags, and the script's path
    os.execv(sys.executable, [sys.executable, *script, *kept])
