"""Which libraries train over ranks as in one process: runs the rows of board/, and writes docs/SCOREBOARD.md.

    python tools/maintain/scoreboard.py [LIBRARY...] [--row NAME] [--again] [--compare] [--envs FOLDER] [--keep FOLDER]

Each library has an environment of its own, which is made where it is not there yet and removed with --remove; one at a
time on disk is enough. Rows that docs/scoreboard.jsonl has are not run again without --again. `--page` only writes the
page; `--row` repeats one row alone, prints what it says and compares it with the page, which stays as it is;
`--compare` does so with all rows, and ends with 1 where one differs.
"""

import argparse
import fcntl
import importlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(HERE / "board"))
import page  # noqa: E402

RESULTS = ROOT / "docs" / "scoreboard.jsonl"
BASE, COMMON = "torch", "torch==2.13.0"
LIBRARIES = [path.stem[3:] for path in sorted((HERE / "board").glob("of_*.py"))]


def known_rows() -> list[dict]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def keep(new: dict) -> None:
    """In the file, in place of the same row's or the same environment's older line."""
    with open(__file__, "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several libraries may be at work
        replace(new)


def replace(new: dict) -> None:
    rows = [each for each in known_rows() if (each["library"], each.get("row")) != (new["library"], new.get("row"))]
    rows.append(new)
    part = RESULTS.with_suffix(".part")
    part.write_text("".join(json.dumps(each) + "\n" for each in sorted(
        rows, key=lambda each: (each["library"], each.get("row") or ""))))
    part.replace(RESULTS)


def environment(library: str, envs: pathlib.Path, keeps: bool) -> pathlib.Path:
    """The library's own Python, made with what its recipes need."""
    recipes = importlib.import_module(f"of_{library}")
    folder = envs / getattr(recipes, "ENVIRONMENT", library)
    python = folder / "bin" / "python"
    if (folder / "made").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    since = time.time()
    print(f"{library}: an environment with {' '.join(recipes.NEEDS)}", file=sys.stderr, flush=True)
    if library != BASE and COMMON in recipes.NEEDS:  # begin with links to what is the same in most of them
        shutil.copytree(environment(BASE, envs, keeps).parents[1], folder, symlinks=True, copy_function=os.link)
        (folder / "made").unlink()
    else:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", *recipes.NEEDS], check=True)
    for package in getattr(recipes, "WITHOUT_DEPENDENCIES", ()):
        subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", package], check=True)
    size = int(subprocess.run(["du", "-sk", folder], capture_output=True, text=True).stdout.split()[0]) / 1e6
    if keeps:
        keep({"library": library, "needs": [*recipes.NEEDS], "seconds": round(time.time() - since),
              "gigabytes": round(size, 1)})
    (folder / "made").touch()
    return python


def run(library: str, names: list[str], python: pathlib.Path, keep_in: pathlib.Path | None):
    """Yields what each row says. A worker that dies takes its row with it, and the next worker goes on behind it."""
    while names:
        keeping = ["--keep", keep_in] if keep_in else []
        worker = subprocess.Popen(
            [python, HERE / "board" / "worker.py", library, *keeping, "--rows", *names],
            stdout=subprocess.PIPE,
            text=True,
        )
        for line in worker.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                names = names[names.index(found["row"]) + 1:]
                yield found
        if worker.wait() == 0:
            return
        sys.exit(f"error: the worker of {library} ended with {worker.returncode} before row {names[0]}: see above")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", help=f"of {', '.join(LIBRARIES)} (default: all)")
    parser.add_argument("--row", help="the name of one row, as the page has it")
    parser.add_argument("--again", action="store_true", help="run rows that are there, too")
    parser.add_argument(
        "--compare", action="store_true", help="run all rows, and keep nothing: are they as the page says?"
    )
    parser.add_argument("--page", action="store_true", help="write the page and nothing else")
    parser.add_argument("--remove", action="store_true", help="remove a library's environment behind its last row")
    parser.add_argument("--envs", type=pathlib.Path, default=pathlib.Path.home() / ".cache" / "scoreboard",
                        help="where environments are made (default: %(default)s)")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for recordings and outputs of ranks")
    args = parser.parse_args()
    if unknown := {*args.libraries} - {*LIBRARIES}:
        parser.error(f"no recipes of {', '.join(unknown)}: name of {', '.join(LIBRARIES)}")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    differ = []
    for library in [] if args.page else args.libraries or LIBRARIES:
        differ += run_library(library, args)
    if differ:
        sys.exit(f"not as the page says: {'; '.join(differ)}")
    if not args.row and not args.compare:
        page.write(known_rows(), ROOT / "docs" / "SCOREBOARD.md")


def run_library(library: str, args) -> list[str]:
    """Runs what is asked for, keeps it unless it is only compared, and returns what is not as the page says."""
    there = {each["row"]: each for each in known_rows() if each["library"] == library and "row" in each}
    names, differ = [row.name for row in importlib.import_module(f"of_{library}").ROWS], []
    if args.row:
        names = [name for name in names if name == args.row]
    elif not args.again and not args.compare:
        names = [name for name in names if name not in there]
    if not names:
        return []
    for found in run(library, names, environment(library, args.envs, not (args.row or args.compare)), args.keep):
        said = page.outcome(there[found["row"]]) if found["row"] in there else "nothing"
        print(f"{library} {found['row']}: {page.outcome(found)}, {found['seconds']} s", flush=True)
        if args.row:
            print("\n".join(found["lines"]), f"(the page says: {said})", sep="\n")
        if args.row or args.compare:
            differ += [f"{found['row']}: {page.outcome(found)} instead of {said}"] * (said != page.outcome(found))
        else:
            keep(found)
    if args.remove:
        shutil.rmtree(args.envs / getattr(importlib.import_module(f"of_{library}"), "ENVIRONMENT", library))
    return differ


if __name__ == "__main__":
    main()
