"""docs/MUSEUM.md: every fault of the museum, how far it takes the loss, and what each check says of it.

    python tools/museum/page.py [--jobs 2]      # writes the page, when all faults are done: 15 s a fault and core
    python tools/museum/page.py samples each    # prints the rows of these, and writes nothing

Faults of the same step and flags are one task, so that what they are compared with is trained once for all of them.
"""

import argparse
import concurrent.futures
import functools
import importlib
import multiprocessing
import os
import pathlib
import re
import sys
import tempfile
from typing import NamedTuple

sys.path[1:1] = map(str, pathlib.Path(__file__).resolve().parents[1:3])  # tools/, and where lab is

from lab.launch import ROOT
from museum import checks, trainers
from museum.fault import Fault
from museum.faults import FAULTS

PAGE, STEPS, LONGEST = ROOT / "docs" / "MUSEUM.md", 100, 60
HEADS = ["fault", "axis", "where", "what is wrong", "reports", "loss", *checks.CHECKS]
STOPS = "stops: "  # what a cell begins with where ranks stop before there is something to compare
HEAD = """# Museum of faults

Each of these faults was in somebody's trainer. Here it is a few changed lines of a step of this course, or of a small
trainer in [`same_numbers/`](../same_numbers), and one row. A row says how far the loss of step 100 is from the right
one (of rollouts, the reward), and what five checks say: *numbers* compares many processes with one
([SAME_NUMBERS.md](SAME_NUMBERS.md)); *bytes* counts what each rank sends, *messages* follows it, and *schedule* plays
the pipeline without ranks ([DEBUGGING.md](DEBUGGING.md)); *types* says what a tensor is over ranks
([TYPES.md](TYPES.md)).

`python tools/break_it.py NAME` shows what happens, `--find` what the check says, and `--guess` is for practice: it does
not tell which fault it is. "no": the check says nothing; "–": it has nothing to look at; "stops": the ranks do not
reach what it looks at, or the loss of step 100 ("-"). `python tools/museum/page.py` writes this page.
"""


class Row(NamedTuple):
    name: str
    off: float | None  # the loss of step 100 beside that of the right run, less 1; None where ranks do not get there
    said: dict[str, checks.Finding]  # by each check


def last_loss(fault: Fault, healthy: bool) -> float:
    """Of step 100 on random samples: of a trainer, which is right in one process; of a step, with few layers. Of
    rollouts it is the mean reward: their loss is about 0 all the time."""
    if fault.is_trainer:
        with tempfile.TemporaryDirectory() as folder:
            trainer = trainers.of(fault.step, fault.program(healthy=healthy).load())
            trainers.record(1 if healthy else 2, [(trainer, folder)], STEPS)
            return trainers.losses(folder)[STEPS - 1]
    program = fault.program(*checks.FEW_MICROBATCHES, healthy=healthy)
    sizes = program.sizes
    row = checks.train(program, STEPS, layers=max(sizes.pp_size * sizes.virtual_stages, 2)).rows[-1]
    return row.get("reward", row["loss"])


@functools.cache
def right_loss(where: str, besides: tuple) -> float:
    return last_loss(Fault("", where, "", (), (), {}, besides), healthy=True)


def off_by(fault: Fault) -> float | None:
    """How far from the right loss, relative to it: a step's on as many ranks, a trainer's in one process."""
    try:
        return last_loss(fault, healthy=False) / right_loss(fault.where, fault.besides) - 1
    except (Exception, SystemExit):  # whatever ranks stop with; of a library there is no step
        return None


def find(fault: Fault, check: str) -> checks.Finding:
    """What a check says, or with what the ranks stop."""
    try:
        found = checks.find(fault, check)
        return found._replace(saw=found.saw.replace("the ranks stop: ", STOPS, 1))
    except (Exception, SystemExit) as error:
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        return checks.Finding(False, STOPS + lines[-("Traceback" in str(error))], tried=False)


def rows_of(names: list[str]) -> list[Row]:
    """Says on stderr how far it is, and what checks do not say though the fault's record has it."""
    rows = []
    for name, fault in [(name, FAULTS[name]) for name in names]:
        rows.append(Row(name, off_by(fault), {check: find(fault, check) for check in checks.CHECKS}))
        silent = ", ".join(check for check in fault.seen if check in rows[-1].said and not rows[-1].said[check].alarm)
        print(*cells(rows[-1]), *[f"NOT AS RECORDED: {silent}"] * bool(silent), sep=" | ", file=sys.stderr, flush=True)
    return rows


def all_rows(names: list[str], jobs: int) -> list[Row]:
    tasks = {}
    for name in names:
        tasks.setdefault((FAULTS[name].where, FAULTS[name].besides), []).append(name)
    os.environ["OMP_NUM_THREADS"] = "1"
    with concurrent.futures.ProcessPoolExecutor(  # a new process for each task: runs keep memory
            jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        made = pool.map(rows_of, sorted(tasks.values(), key=len, reverse=True))
        return sorted(sum(made, []), key=lambda each: names.index(each.name))


def plain(text: str) -> str:
    """As Markdown in a cell that shows the text as it is."""
    return re.sub(r"([\\|*<`_\[$])", r"\\\1", " ".join(text.split()))


def short(said: str, expression: str = "") -> str:
    """What a check says in one line of 60 characters; from what the record expects on, where that comes late."""
    said = re.sub(r"^step \d+: ", "", said)
    match, first = re.search(expression, said), " ".join(said.partition("\n")[0].split())
    is_late = match and len(first) > LONGEST <= match.end()
    cut = f"… {' '.join(said[match.start():].split())}" if is_late else first
    return plain(cut if len(cut) <= LONGEST else f"{cut[: LONGEST - 1].rpartition(' ')[0]} …")


def percent(difference: float | None) -> str:
    """In two digits; 0 below a thousandth of a percent."""
    if difference is None or difference != difference:
        return "-" if difference is None else "NaN"
    return f"{float(f'{100 * difference:.2g}'):+g} %" if abs(difference) >= 1e-5 else "0 %"


def link(report: str) -> str:
    """To an issue, a pull request, a paper or a page. GitHub leads from issues/ to pull requests by itself."""
    address = re.sub(r"^arXiv[: ]", "https://arxiv.org/abs/", report)
    address = address if "://" in address else f"https://github.com/{address.replace('#', '/issues/')}"
    return f"[{report.removeprefix('https://')}]({address})"


def cells(made: Row) -> list[str]:
    fault, said = FAULTS[made.name], []
    for check, found in made.said.items():
        words = fault.seen.get(check, "")
        shown = short(found.saw, words[1] if isinstance(words, tuple) else words)
        said.append("–" if checks.cannot(fault, check) else "no" if found.tried and not found.alarm else shown)
    kind, _, flags = fault.where.partition(" ")
    where = f"step {kind}" + f" `{flags}`" * bool(flags) if kind.isdigit() else fault.where
    return [plain(fault.name), fault.axis, where, plain(fault.sentence), ", ".join(map(link, fault.reported)),
            percent(made.off), *said]


def table(heads: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(each)} |" for each in [heads, ["---"] * len(heads), *rows])


def counts(rows: list[Row]) -> str:
    alarms = [[each.said[check].alarm for check in checks.CHECKS] for each in rows]
    seen = dict(zip(checks.CHECKS, map(sum, zip(*alarms))))
    pairs = [checks.says(FAULTS[each.name], "numbers", each.said["numbers"].saw) for each in rows
             if each.said["numbers"].alarm and isinstance(FAULTS[each.name].seen.get("numbers"), tuple)]
    reports = [len(FAULTS[each.name].reported) for each in rows]
    near = sum(each.off is not None and abs(each.off) < 0.01 for each in rows)
    unseen, nowhere = sum(not any(seen) for seen in alarms), sum(each.off is None for each in rows)
    places, causes = (sum(each) for each in zip(*pairs or [(0, 0)]))
    return f"""- {len(rows)} faults, {sum(map(bool, reports))} of them with reports, {sum(reports)} in all.
- Seen by {", ".join(f"{check}: {number}" for check, number in seen.items())}; by none: {unseen}.
- Within 1 % of the right loss at step 100: {near}; not there at all: {nowhere}.
- By numbers: {seen["numbers"]} found, {places} placed and {causes} named rightly in the verdict's first line.
"""


def found_rows(text: str) -> list[list[str]]:
    """docs/FOUND.md's table: number, library, what, and the report, or on which day there was none."""
    day = re.search(r"\bon\s+(\d{1,2}\s\w+\s\d{4})", text)[1]
    rows, pattern = [], re.compile(r"^\| \[(\d+)\]\(#(fault-\d+)\) \| (.+?) \| (.+?) \| (.+?) \|$", re.M)
    for number, anchor, library, what, report in pattern.findall(text):
        report = re.sub(r"([\w.-]+/[\w.-]+) (\d+(?:, \d+)*)", lambda match: ", ".join(
            link(f"{match[1]}#{each}") for each in match[2].split(", ")), report)
        report += f" ({day})" if "no report found" in report else ""
        rows.append([f"[{number}](FOUND.md#{anchor})", library, what, report])
    return rows


def page(rows: list[Row]) -> str:
    found = found_rows((ROOT / "docs" / "FOUND.md").read_text(encoding="utf-8"))
    reported = sum("no report found" not in each[-1] for each in found)
    return "\n".join([HEAD, counts(rows), table(HEADS, [*map(cells, rows)]), f"""
## In released libraries

{len(found)} more were found by running libraries as they are released ([FOUND.md](FOUND.md)); {reported} of them had a
report. They are not counted above.
""", table(["", "library", "what", "report"], found), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="print the rows of these and write nothing")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: the number of cores)")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in FAULTS]:
        parser.error(f"there is no fault {unknown[0]!r}: choose among {', '.join(FAULTS)}")
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: at least one process has to run")
    importlib.import_module("museum.typed")  # which ends here where spmd_types is missing
    rows = all_rows(args.names or [*FAULTS], args.jobs)
    if args.names:
        print(table(HEADS, [*map(cells, rows)]))
    else:
        PAGE.write_text(page(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
