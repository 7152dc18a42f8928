"""Plays a tour in the terminal: each scene's lines of code, and what there is to know about them.

    python tools/tour.py              all tours
    python tools/tour.py 4            of step 4; from its fifth scene on: python tools/tour.py 4 5

Enter goes on, b goes back, r runs the scene's command, q ends. Lines that the step added have a +, those of the scene
stand out. Where the output is no terminal, all scenes are printed one after the other.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from course.steps_compare import find_steps, predecessor
from course.tours import Scene, Tour, find_tours, read_tour, shown_lines

ROOT = Path(__file__).resolve().parents[1]


def code_of(scene: Scene, before: Path | None, width: int, coloured: bool) -> str:
    """The lines of the scene's place with their numbers and some context, or how the diff can be read."""
    if scene.place is None:
        return ""
    path, first, last = scene.place
    shown = []
    for number, is_lit, is_added, line in shown_lines(scene.place, before):
        text = f"{'>' if is_lit else ' '}{number:4} {'+' if is_added else ' '} {line}"[:width]
        shown.append(f"\033[2m{text}\033[0m" if coloured and not is_lit else text)
    return "\n".join([f"{os.path.relpath(path, ROOT)}, lines {first} to {last}", *shown])


def show(tour: Tour, index: int, steps: dict[int, Path]) -> str:
    """Prints a scene; returns the command that r runs, or ""."""
    scene, coloured = tour.scenes[index], sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    width = max(60, shutil.get_terminal_size().columns)
    number = next((n for n, folder in steps.items() if folder == tour.path.parent), None)
    before = predecessor(steps, number) if number else None
    command = scene.command
    if scene.place is None and not command:  # it shows a diff
        numbers = [n for folder in (before, tour.path.parent) for n, step in steps.items() if step == folder]
        command = f"python tools/steps.py diff {numbers[0]} {numbers[1]} {scene.diff}".rstrip()
    title = f"{index + 1}/{len(tour.scenes)}  {scene.title}"
    parts = [f"\033[1m{title}\033[0m" if coloured else title, code_of(scene, before, width, coloured),
             *(textwrap.fill(part, min(width, 100)) for part in scene.words.split("\n\n")), command and f"$ {command}",
             scene.expected and f"Look for: {scene.expected}"]
    print("\n\n".join(part for part in parts if part), end="\n\n", flush=True)
    return command


def play(tour: Tour, first: int, steps: dict[int, Path]) -> None:
    """Shows scene after scene, as the reader's keys say."""
    index, is_read = first, sys.stdin.isatty() and sys.stdout.isatty()
    while index < len(tour.scenes):
        command = show(tour, index, steps)
        answer = input("Enter: on, b: back, r: run, q: end > ").strip().lower() if is_read else ""
        while answer == "r" and command:
            subprocess.run(command, shell=True, cwd=ROOT)
            answer = input("Enter: on, b: back, r: run, q: end > ").strip().lower()
        if answer == "q":
            return
        index = max(0, index - 1) if answer == "b" else index + 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tour", nargs="?", help="4, 9, 9b, micro-batch, cluster (default: list them)")
    parser.add_argument("scene", nargs="?", type=int, default=1, help="where to begin (default: %(default)s)")
    args = parser.parse_args()
    try:
        tours = {name: read_tour(path) for name, path in find_tours(ROOT).items() if args.tour in (None, name)}
        if args.tour is None:
            print(*(f"{name:12} {len(tour.scenes):2} scenes  {tour.title}" for name, tour in tours.items()), sep="\n")
            return 0
        if args.tour not in tours:
            raise ValueError(f"there is no tour {args.tour!r}: choose one of {', '.join(find_tours(ROOT))}")
        tour = tours[args.tour]
        if not 1 <= args.scene <= len(tour.scenes):
            raise ValueError(f"the tour {args.tour} has no scene {args.scene}: choose from 1 to {len(tour.scenes)}")
        play(tour, args.scene - 1, find_steps(ROOT))
    except ValueError as error:
        print(f"tour.py: {error}", file=sys.stderr)
        return 2
    except (EOFError, KeyboardInterrupt):
        print()
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # `tour.py 4 | head` ends quietly
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main())
