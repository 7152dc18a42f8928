"""docs/TYPES.md's table: of each fault, do types find it, do numbers, and how far off is the loss of step 100?

    python tools/maintain/types_table.py        # a quarter of an hour

The museum's faults train here, on ranks in one process, with two layers. What same_numbers and the loss say of the
published ones is in docs/SAME_NUMBERS.md, whose command is tools/museum/published_faults.py.
"""

import pathlib
import re
import sys

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

from find_by_types import FAULTS, FEW_MICROBATCHES, check, not_tried, published, run, threads, trainers
from lab.launch import ROOT
from lab.thread_ranks import Violation
from museum.find_faults import find


def off_after(name: str, steps: int = 100) -> str:
    """How far a fault takes the loss of this step from that of the same run without it, in percent; "-" of none."""
    def loss(healthy: bool) -> float:
        program = FAULTS[name].program(*FEW_MICROBATCHES, healthy=healthy)
        tokens = 16 * program.sizes.dp_size * program.sizes.gradient_accumulation_steps * steps
        words = "--num_hidden_layers", max(program.sizes.pp_size, 2), "--max_tokens", tokens
        program = program.with_flags([*program.flags, *words])
        return run(program, threads(program.size), timeout=600).rows[-1]["loss"]

    try:
        percent = 100 * (loss(False) / loss(True) - 1)
        return f"{percent:+.2g}" if abs(percent) > 1e-3 else "0"
    except (Violation, KeyError):
        return "-"


def table(rows: list[tuple[str, str, bool, str]]) -> str:
    """In Markdown, of (fault, by types, by numbers, off): a row for the museum and for each trainer, and the rest."""
    def cell(column: tuple[str, bool], where: str = "") -> str:
        found = [(name, off) for name, *found, off in rows if tuple(found) == column
                 and where in ("", name.split()[0] if " " in name else "museum")]
        return ", ".join(f"{name.split()[-1] if where else name} {off}" for name, off in found)

    lines = ["| faults of | by types and by numbers | by numbers alone |", "| --- | --- | --- |"]
    for where in ["museum", *trainers()]:
        cells = [cell(("yes", True), where), cell(("no", True), where)]
        lines += [f"| {where} | {' | '.join(cells)} |"] if any(cells) else []
    rest = {"By types alone": ("yes", False), "By neither": ("no", False),
            "By numbers, types not tried": ("not tried", True)}
    return "\n".join([*lines, "", *(f"- {words}: {cell(column)}" for words, column in rest.items())])


def main() -> int:
    """Prints a table of what types and numbers find, and how far off the loss of step 100 is, in percent."""
    page, rows = (ROOT / "docs" / "SAME_NUMBERS.md").read_text(encoding="utf-8"), []
    for name in [*FAULTS, *published()]:
        types = "not tried" if not_tried(name) else "yes" if check(name) else "no"
        if name in FAULTS:
            try:
                numbers = find(FAULTS[name], check="same").alarm
            except (Violation, KeyError):
                numbers = False
            off = off_after(name)
        else:  # python tools/museum/published_faults.py has measured these
            row = re.search(rf"^\| {name.replace(' ', ', ')}: .*$", page, re.M)[0].split(" | ")
            numbers, off = bool(row[3]), row[2].removesuffix(" %")
        rows.append((name, types, numbers, off))
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
