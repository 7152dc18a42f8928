"""The rooms of cluster/: an import points down, or stays in its room, and no room is full."""

import ast

import pytest
from launch import ROOT

CLUSTER = ROOT / "cluster"
FLOORS = [["hosts"], ["ranks"], ["models"], ["checkpoints", "data", "membership"], ["planning"], ["run"], ["inference"],
          ["engines"], [""]]  # from the lowest to the highest, which is cluster/ itself
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


def test_rooms_are_listed_and_not_full():
    assert {path.parent.name for path in CLUSTER.glob("*/*.py")} == {*FLOOR_OF} - {""}
    assert max(len([*(CLUSTER / room).glob("[!_]*.py")]) for room in FLOOR_OF) <= 16
