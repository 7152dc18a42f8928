"""docs/SCOREBOARD.md out of the rows' results."""

import pathlib


def outcome(row: dict) -> str:
    """exact, wrong, not judged, or does not run."""
    return "does not run" if row["code"] is None else {0: "exact", 1: "wrong"}.get(row["code"], "not judged")


def write(rows: list[dict], path: pathlib.Path) -> None:
    pass
