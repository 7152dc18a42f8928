"""How scripts end that refuse what they are given: ranks of a step's train.py in threads of this process, a script of
one process in this one, and several ranks of another script in forked processes.
"""

import contextlib
import io
import os
import re
import runpy
import signal
import sys
from unittest import mock

import torch.distributed as dist
from lab.launch import ROOT, fork, modules_of
from lab.program import Program
from lab.thread_ranks import World

SECRET = "c0rrect-h0rse"  # which nothing shows
SECONDS = 60  # what runs longer hangs
SHORT = ["--seq_len", 32, "--micro_batch_size", 1, "--max_tokens", 256, "--num_hidden_layers", 2]  # 4 steps


def short_run(step: int | str, folder, flags) -> list[str]:
    """The flags of a short run, with `flags` last: of a flag given twice the second one counts."""
    data = ["--gradient_accumulation_steps", 2, "--log_dir", folder / "runs"] if int(step) >= 3 else []
    return [str(word) for word in (*SHORT, *data, *flags)]


def in_threads(step: str, ranks: int, flags: list[str]) -> tuple[int, str]:
    """Exit code and stderr that a UserError of these ranks leads to. Another exception is raised."""
    modules = [Program(step).load() for _ in range(ranks)]
    try:
        with mock.patch.object(sys, "argv", ["train.py", *flags]):
            World(ranks).run(lambda rank: modules[rank].train.main(), SECONDS)
    except ValueError as error:
        if not isinstance(error, modules[error.rank].utils.UserError):
            raise
        return 2, f"error: {error}\n"
    return 0, ""


def leave(code=0) -> None:
    raise SystemExit(code)


def in_this_process(script, words: list[str]) -> tuple[int, str]:
    """Exit code and stderr of a script, without argparse's usage. Its end is not that of this process."""
    shown, said, numbers = io.StringIO(), io.StringIO(), (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGALRM)
    handlers = [*map(signal.getsignal, numbers)]
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("it is not refused, and runs for minutes"))
    signal.alarm(3 * SECONDS)
    with (mock.patch.object(sys, "argv", [str(script), *words]), mock.patch("os._exit", leave), modules_of(9),
          mock.patch.object(sys, "path", [str(script.parent), *sys.path]), mock.patch("atexit._run_exitfuncs"),
          mock.patch.object(sys, "unraisablehook", sys.unraisablehook), contextlib.redirect_stdout(shown),
          contextlib.redirect_stderr(said), mock.patch("argparse.ArgumentParser.print_usage")):
        try:
            runpy.run_path(str(script), run_name="__main__")
            code = 0
        except SystemExit as end:
            code = end.code or 0
        finally:
            signal.alarm(0)
            if dist.is_initialized():
                dist.destroy_process_group()
            for number, handler in zip(numbers, handlers):
                signal.signal(number, handler)
    assert SECRET not in shown.getvalue()
    return (1, f"{said.getvalue()}{code}\n") if isinstance(code, str) else (code, said.getvalue())


def end_of(script: str, ranks: int, words: list, **env: str) -> tuple[int, str]:
    """Exit code and stderr. `script`: the path in the repository or, for its train.py, the number of a step."""
    words = [*map(str, words)]
    with mock.patch.dict(os.environ, env):
        if script.isdigit():
            return in_threads(script, ranks, words)
        if ranks == 1:
            return in_this_process(ROOT / script, words)
    done = fork(9, ranks, *words, script=ROOT / script, check=False, timeout=SECONDS, env=env, modules=["peft"])
    return done.returncode, done.stderr


def require_refused(code: int, stderr: str, words: str) -> None:
    """One line has the parts of `words` in their order; or more lines, with " / " in `words` for an end of line."""
    assert code == 2 and stderr.count("\n") == 1 + words.count(" / "), f"exit code {code}\n{stderr[-4000:]}"
    assert re.match(r"(\w+\.(py|sh): )?error: |tour.py: ", stderr.splitlines()[-1]), stderr
    assert "Traceback" not in stderr and re.search(".*".join(map(re.escape, words.split(" ... "))),
                                                   stderr.replace("\n", " / ")), (words, stderr)
