"""Imports modules, and asks scripts for --help, each in a process of its own and in another working directory.

`imports.py FILE...` prints a JSON object: "FILE" or "FILE --help" -> what went wrong, for each that failed. A FILE is
a script where it parses arguments. A module's own folder is on the path, or the folder of the package that holds it; of
one in tools/site/ also tools/, which the script that imports it has put there.
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
    if path.parent.name == "site":
        sys.path.insert(1, str(path.parent.parent))
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
    """None, or what went wrong: in a new folder, where nothing is to be written, and with nothing on stderr."""
    with (tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as output,
          tempfile.TemporaryFile("w+") as errors):
        if (pid := os.fork()) == 0:
            code = 1
            with contextlib.suppress(BaseException):
                os.chdir(folder)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                code = 0 if run(path, words) else 1
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        errors.seek(0)
        printed, complaint, written = output.read(), errors.read(), os.listdir(folder)
    is_complete = not words or "/tools/" not in str(path) or "tools/" in printed  # --help shows an example
    if status == 0 and not complaint and not written and ("usage: " in printed) == bool(words) and is_complete:
        return None
    return f"status {status}, written: {written}\n{printed[-1000:]}{complaint[-2000:]}"


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
