"""Imports modules, and asks scripts for --help, each in a process of its own and in another working directory.

`imports.py FILE...` prints a JSON object: "FILE" or "FILE --help" -> what was printed, for each that failed. A FILE is
a script where it parses arguments. A module's own folder is on the path, or the folder of the package that holds it.
"""

import contextlib
import importlib
import json
import os
import pathlib
import runpy
import sys
import tempfile
import traceback


def run(path: pathlib.Path, words: list[str]) -> bool:
    """Imports the module or, with `words`, runs the script with these arguments. Did it end as it should?"""
    sys.argv, sys.path[0] = [str(path), *words], str(path.parent)
    try:
        if (path.parent / "__init__.py").exists():
            sys.path[0] = str(path.parent.parent)
            importlib.import_module(f"{path.parent.name}.{path.stem}")
        else:
            runpy.run_path(str(path), run_name="__main__" if words else path.stem)
    except SystemExit as end:
        return not end.code and bool(words)  # --help ends so, an import does not
    except BaseException:
        traceback.print_exc()
        return False
    return not words


def attempt(path: pathlib.Path, words: list[str]) -> str | None:
    """None, or what was printed where it failed."""
    with tempfile.TemporaryDirectory() as folder, open(os.path.join(folder, "output"), "w+") as output:
        if (pid := os.fork()) == 0:
            with contextlib.suppress(BaseException):
                os.chdir(folder)
                os.dup2(output.fileno(), 1)
                os.dup2(output.fileno(), 2)
                succeeded = run(path, words)
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0 if succeeded else 1)
            os._exit(1)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        text = output.read()
    if status:
        return text[-2000:] or f"status {status}"
    return None if not words or "usage: " in text else f"no usage: {text[-2000:]}"


def main(paths: list[str]) -> None:
    failed = {}
    for path in map(pathlib.Path, paths):
        attempts = {str(path): []}
        text = path.read_text()
        if "__main__" in text and ("parse_args(" in text or "parse_known_args(" in text):
            attempts[f"{path} --help"] = ["--help"]
        failed |= {what: error for what, words in attempts.items() if (error := attempt(path, words)) is not None}
    print(json.dumps(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
