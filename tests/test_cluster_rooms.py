"""The rooms of cluster/: an import points down, or stays in its room, and no group has a default."""

import ast

import pytest
from lab.launch import ROOT

CLUSTER = ROOT / "cluster"
FLOORS = [["hosts"], ["ranks"], ["models"], ["checkpoints", "data", "membership"], ["planning"], ["run"], ["inference"],
          [""]]  # from the lowest to the highest, which is cluster/ itself
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = [path for room in FLOOR_OF for path in sorted((CLUSTER / room).glob("*.py"))]


def rooms_of(source: str) -> set[str]:
    """The rooms of cluster/ from which a module imports; "" stands for its commands."""
    names = {name for node in ast.walk(ast.parse(source)) for name in (
        [node.module or ""] if isinstance(node, ast.ImportFrom) else
        [alias.name for alias in node.names] if isinstance(node, ast.Import) else [])}
    commands = {path.stem for path in CLUSTER.glob("*.py")}
    return {"" if name in commands else name.partition(".")[0] for name in names} & {*FLOOR_OF}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(CLUSTER)))
def test_an_import_points_down(path):
    room = str(path.parent.relative_to(CLUSTER)).strip(".")
    beside = {"models"} if room == "checkpoints" else set()  # the weights of a checkpoint have the names of models
    up = {other for other in rooms_of(path.read_text()) - {room} - beside if FLOOR_OF[other] >= FLOOR_OF[room]}
    assert not up, f"{room}/ imports from {', '.join(sorted(up))}, which is not below it"


def test_rooms_are_listed():
    assert {path.parent.name for path in CLUSTER.glob("*/*.py")} == {*FLOOR_OF} - {""}


def test_no_group_keeps_a_default_time_out():
    """The library's, of half an hour, ends a run whose disk or link is slow."""
    made = 0
    for path in (*MODULES, *(ROOT / "step9_heterogeneous_pp").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "").startswith(("new_group", "new_subgroups")):
                made += 1
                limits = [*node.args[1:2], *(each.value for each in node.keywords if each.arg == "timeout")]
                assert limits and ast.unparse(limits[0]) != "None", f"{path}:{node.lineno}: give it a timeout"
    assert made > 8
