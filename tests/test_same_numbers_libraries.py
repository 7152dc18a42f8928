"""same_numbers on other people's trainers, as they come: right, and with a gradient three times too large.

    pytest -m trainers tests/test_same_numbers_libraries.py

They are rows of the scoreboard. What a library lacks here is skipped.
"""

import collections
import contextlib
import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
import time

import pytest
from lab.launch import ROOT

ROWS = [("torch", "decoder-DDP-2"), ("torch", "decoder-DDP-2,-compiled-by-aot_eager"), ("torch", "decoder-FSDP2-2"),
        ("torch", "decoder-DDP-2,-ZeroRedundancyOptimizer"), ("torch", "decoder-HSDP-2-x-2"),
        ("torch", "decoder-tp-2,-embedding-too-m2"), ("transformers", "llama-tp_plan-2"), ("lightning", "Fabric-DDP-2"),
        ("lightning", "Trainer-DDP-2,-recorded-by-the-callback"), ("megatron", "GPT-qk_layernorm-tp-2"),
        *(("deepspeed", f"decoder-ZeRO-{stage}") for stage in (1, 2, 3))]


def run_rows(library: str, *names: str, **variables: str) -> list[dict]:
    """What the scoreboard's worker says of these rows of a library."""
    ran = subprocess.run([sys.executable, ROOT / "tools/maintain/board/worker.py", library, "--rows", *names],
                         env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
    again = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert {row["row"] for row in again} == {*names}, ran.stderr
    return again


@pytest.mark.trainers
@pytest.mark.drawn(4)
@pytest.mark.parametrize("library, name", ROWS)
def test_another_library_is_right_and_a_factor_is_named(library, name):
    if not importlib.util.find_spec(library):
        pytest.skip(f"{library} is not installed: pip install -e '.[trainers]'")
    for factor, code, words in ((1, 0, "the same numbers in steps [1, 2, 3]"), (3, 1, ": 3 times too large")):
        [found] = run_rows(library, name, FACTOR=str(factor))
        assert found["code"] == code and words in "\n".join(found["lines"]), found


def rows_for_here():
    """library -> rows of the scoreboard whose versions are those of this environment."""
    found = collections.defaultdict(list)
    for row in map(json.loads, (ROOT / "docs" / "scoreboard.jsonl").read_text().splitlines()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError, KeyError):  # a row about an environment
            if all(importlib.metadata.version(name) == version for name, version in row["versions"].items()):
                found[row["library"]].append(row)
    return found


@pytest.mark.trainers
def test_drawn_rows_of_the_scoreboard_are_as_its_page_says():
    """Two of each library, then two more of each, until two minutes are used: at least six, of at least three."""
    rows, since, draw = rows_for_here(), time.time(), random.Random(os.environ.get("DRAW"))
    assert len(rows) >= 3, f"only of {[*rows]} are versions as the scoreboard's: make it again, or take constraints.txt"
    libraries, compared, differ = [*rows], [], []
    draw.shuffle(libraries)
    for _ in range(max(map(len, rows.values()))):
        for library in [each for each in libraries if rows[each]]:
            if time.time() - since > 120 and len(compared) >= 6:
                break
            drawn = {row["row"]: row for row in draw.sample(rows[library], min(2, len(rows[library])))}
            rows[library] = [row for row in rows[library] if row["row"] not in drawn]
            again = run_rows(library, *drawn)
            compared += again
            differ += [f"{library} {row['row']}: {row['lines']}, the page has {drawn[row['row']]['lines']}"
                       for row in again if row["code"] != drawn[row["row"]]["code"]]
    assert not differ, "\n".join(differ)
    print(f"as the page says: {[row['row'] for row in compared]}")
