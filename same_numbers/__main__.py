"""python -m same_numbers ONE MANY [--json]: is what MANY records what ONE, a trusted run, best of one process, records?

Prints a line a finding, the first wrong thing first; after a yes, what it is about and what was not judged.
Exits with 0 (the same), 1 (not) or 2 (nothing can be compared).
"""

import argparse
import dataclasses
import json
import pathlib
import sys

import torch

from same_numbers import __version__
from same_numbers.verdict import compare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("one", type=pathlib.Path, help="the folder of the trusted recording")
    parser.add_argument("many", type=pathlib.Path, help="the folder of the other one")
    parser.add_argument("--version", action="version", version=f"same-numbers {__version__}, torch {torch.__version__}")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, and notes on standard error")
    args = parser.parse_args()
    try:
        verdict = compare(args.one, args.many)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in verdict.found], indent=1))
    for each in verdict.found if not args.json else ():
        print(each.line)
    for note in verdict.notes:
        print(f"({note})", file=sys.stderr if args.json else sys.stdout)
    if not verdict.found and not args.json:
        print(f"the same numbers in steps {verdict.steps}")
    return int(bool(verdict.found))


if __name__ == "__main__":
    sys.exit(main())
