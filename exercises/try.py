"""Write the parts of the course yourself, and have them checked.

    python exercises/try.py                        # the exercises, and which are solved
    python exercises/try.py start ring_all_reduce  # writes exercises/mine/ring_all_reduce.py, for you to fill in
    python exercises/try.py check ring_all_reduce  # runs it, and says what is wrong
    python exercises/try.py check ring_all_reduce --torchrun  # where that makes sense: on processes, too
    python exercises/try.py hint ring_all_reduce   # the next of up to three hints
    python exercises/try.py solution ring_all_reduce  # ours, where it stands in the course
    python exercises/try.py reset ring_all_reduce  # begins again; your version is kept as ring_all_reduce.py.1
    python exercises/try.py check --all --folder DIR  # all in a folder, for teachers
"""

import argparse
import contextlib
import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "exercises"), str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from blanks import Unwritten, find  # noqa: E402
from catalogue import Exercise, judge, load, source_path, stub  # noqa: E402
from lab import baton  # noqa: E402
from lab.baton import shown  # noqa: E402
from lab.launch import torchrun as torchrun_command  # noqa: E402


def state_path() -> pathlib.Path:
    """A file with the stars and the hints seen of each exercise."""
    return baton.READER / ".solved.json"


def read_state() -> dict:
    try:
        return json.loads(state_path().read_text())
    except (OSError, ValueError):  # there is none, or it is damaged: then nothing is known
        return {}


def note(name: str, **fields) -> None:
    """Remembers what happened to an exercise."""
    state = read_state()
    state[name] = {**state.get(name, {}), **fields}
    baton.READER.mkdir(parents=True, exist_ok=True)
    state_path().write_text(json.dumps(state, indent=1))


def show_list(exercises: dict[str, Exercise]) -> int:
    state, chapter = read_state(), None
    for one in exercises.values():
        if one.chapter != chapter:
            chapter = one.chapter
            print(f"\n{'step ' + chapter if chapter.isdigit() else chapter}")
        solved = state.get(one.name, {})
        mark = mark_of(solved.get("stars", 0), solved.get("scored")) or ("..." if one.path.is_file() else "")
        print(f"  {mark:5} {one.name:28} {one.title}")
    solved = sum(bool(state.get(name, {}).get("stars")) for name in exercises)
    print(f"\n{solved} of {len(exercises)} solved. Begin one with: python exercises/try.py start NAME")
    return 0


def mark_of(stars: int, scored: bool) -> str:
    """Stars where an optimum is known, "right" where none is, nothing for what is not solved."""
    return "*" * stars if scored else "right" * (stars > 0)


def start(one: Exercise) -> int:
    if one.path.exists():
        raise Unwritten(f"you have begun it already: {shown(one.path)}; `reset {one.name}` begins again")
    baton.READER.mkdir(parents=True, exist_ok=True)
    one.path.write_text(stub(one), encoding="utf-8")
    print(f"{one.title}\n\nwrite it in {shown(one.path)}, then: python exercises/try.py check {one.name}")
    return 0


def reset(one: Exercise) -> int:
    if one.path.exists():
        kept = next(path for i in range(1, 1000) if not (path := one.path.with_suffix(f".py.{i}")).exists())
        one.path.rename(kept)
        print(f"your version is now {shown(kept)}")
    note(one.name, stars=0, hints=0)
    return start(one)


def on_processes(one: Exercise, sizes: set[int]) -> bool:
    """Runs the check on processes: on four or the nearest number for which it has ranks."""
    size = min(sizes - {1}, key=lambda size: (size > 4, abs(size - 4)), default=1)
    if size == 1:
        print("one process is all that its check needs, so there is nothing for torchrun to do")
        return True
    script = ROOT / "exercises" / "on_processes.py"
    print(f"torchrun --nproc_per_node {size} {shown(script)} {shown(one.path)}", flush=True)
    done = subprocess.run(torchrun_command(size, script, one.path), capture_output=True, text=True)
    _, _, said = done.stderr.partition("of the processes: ")
    said = said.partition("\nrank ")[0].partition("\nE1")[0].partition("\nW1")[0]
    print("right on processes, too" if done.returncode == 0 else f"{one.name}: not yet, on processes\n\n"
          f"{said[:2000] or done.stderr[-2000:]}")
    return done.returncode == 0


def check(one: Exercise, torchrun: bool = False) -> int:
    verdict = judge(one, one.path)
    if not verdict.is_right:
        print(f"{one.name}: not yet\n\n{verdict.message}")
        return 1
    if torchrun and not on_processes(one, verdict.sizes):
        return 1
    before = read_state().get(one.name, {}).get("stars", 0)
    note(one.name, stars=max(verdict.stars, before), scored=bool(verdict.scores))
    print(f"{one.name}: right" + (f", {'*' * verdict.stars}" if verdict.scores else ""))
    for score in verdict.scores:
        print(f"  {score.what}: {score.value:g}; "
              f"{'nothing better is possible' if score.stars == 3 else f'{score.best:g} is possible'}")
    return 0


def check_all(exercises: dict[str, Exercise]) -> int:
    """One line for each exercise that is started. Each has a process: an answer that does not end stays in there."""
    started, failed = [one for one in exercises.values() if one.path.is_file()], 0
    if not started:
        raise Unwritten(f"there is no exercise in {shown(baton.READER)}: begin one, or name another --folder")
    for one in started:
        words = [sys.executable, __file__, "check", one.name, "--folder", str(baton.READER)]
        done = subprocess.run(words, capture_output=True, text=True)
        stars = "*" * done.stdout.partition("\n")[0].count("*")
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not line.startswith(one.name)]
        print(f"{'wrong' if done.returncode else 'right':6} {stars:4} {one.name:28} "
              f"{lines[0] if done.returncode and lines else ''}".rstrip(), flush=True)
        failed += done.returncode != 0
    return min(failed, 1)


def hint(one: Exercise) -> int:
    number = min(read_state().get(one.name, {}).get("hints", 0), len(one.hints) - 1)
    print("\n".join(f"hint {i + 1} of {len(one.hints)}: {text}" for i, text in enumerate(one.hints[: number + 1])))
    note(one.name, hints=number + 1)
    return 0


def solution(one: Exercise) -> int:
    """Ours, with the lines around it."""
    place = find(source_path(one), one.name_in_module)
    lines = place.path.read_text(encoding="utf-8-sig").splitlines()
    print(f"{shown(place.path)}, lines {place.first} to {place.last}:\n")
    for number in range(max(1, place.first - 3), min(len(lines), place.last + 3) + 1):
        print(f"{'>' if place.first <= number <= place.last else ' '} {number:3}  {lines[number - 1]}".rstrip())
    return 0


def main(argv: list[str] | None = None) -> int:
    commands = {"start": start, "hint": hint, "solution": solution, "reset": reset}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("command", nargs="?", choices=["list", "check", *commands], default="list", metavar="COMMAND")
    parser.add_argument("name", nargs="?", metavar="EXERCISE")
    parser.add_argument("--all", action="store_true", help="check all exercises that are started")
    parser.add_argument("--torchrun", action="store_true", help="check on processes, too")
    parser.add_argument("--folder", type=pathlib.Path, help="where your files are (default: exercises/mine)")
    args = parser.parse_args(argv)
    if args.folder:
        baton.READER = args.folder.resolve()
    exercises = load()
    if args.all and (args.command != "check" or args.torchrun or args.name):
        parser.error("--all is for check, without a name and without --torchrun")
    if args.torchrun and args.command != "check":
        parser.error("--torchrun is for check")
    try:
        if args.command == "list":
            return show_list(exercises)
        if args.all:
            return check_all(exercises)
        if args.name is None:
            raise Unwritten(f"{args.command} what? Name an exercise: python exercises/try.py lists them")
        if args.name not in exercises:
            raise Unwritten(f"there is no exercise {args.name!r}: python exercises/try.py lists them")
        if args.command == "check":
            return check(exercises[args.name], args.torchrun)
        return commands[args.command](exercises[args.name])
    except Unwritten as error:
        print(error, file=sys.stderr)
    except BrokenPipeError:  # who reads the output has read enough, as in `try.py | head`
        os._exit(0)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 2


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    os._exit(code)  # a check that did not end still runs in a thread
