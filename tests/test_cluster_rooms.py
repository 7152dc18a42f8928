"""The rooms of cluster/: an import points down, or stays in its room, and no group has a default. Those of tools/ and
lab/: what readers type lies at the top, imports make no circle, and nothing leads into tests/."""

import ast
import graphlib
import re
import subprocess

import pytest
from lab.launch import ROOT

CLUSTER = ROOT / "cluster"
FLOORS = [["hosts"], ["ranks"], ["models"], ["checkpoints", "data", "membership"], ["planning"], ["run"], ["inference"],
          [""]]  # from the lowest to the highest, which is cluster/ itself
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
MODULES = [path for room in FLOOR_OF for path in sorted((CLUSTER / room).glob("*.py"))]


def imports_of(source: str) -> set[str]:
    """What a module imports, wherever it does so. Of `from a import b`, a and a.b."""
    nodes = [*ast.walk(ast.parse(source))]
    return {name for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for alias in node.names
            for name in ([alias.name] if isinstance(node, ast.Import) else [node.module, f"{node.module}.{alias.name}"])}


def rooms_of(source: str) -> set[str]:
    """The rooms of cluster/ from which a module imports; "" stands for its commands."""
    names = imports_of(source)
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


def modules_in(*rooms: str) -> dict[str, str]:
    """The names by which modules of these folders are imported, their folder or tools/ being on the path -> source."""
    found = {}
    for path in (path for room in rooms for path in (ROOT / room).rglob("*.py")):
        inside = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(inside[inside[0] == "tools" :]).removesuffix(".__init__")] = path.read_text(encoding="utf-8")
    return found


def test_imports_of_tools_and_lab_make_no_circle_and_lab_knows_no_tool():
    sources = modules_in("lab", "tools")
    graph = {name: (imports_of(source) | {f"site.{each}" for each in imports_of(source)}) & {*sources} - {name}
             for name, source in sources.items()}  # make_site.py puts site/ on the path
    assert sum(map(len, graph.values())) > 150
    [*graphlib.TopologicalSorter(graph).static_order()]
    above = {name.partition(".")[0] for name in modules_in("tools", "exercises")} | {"exercises", "tools"}
    for name in modules_in("lab"):
        assert not above & {each.partition(".")[0] for each in imports_of(sources[name])}, name


def test_nothing_leads_into_tests():
    """No import, and no file's name. How to run pytest is all that pages say of them."""
    tests = {path.stem for path in (ROOT / "tests").glob("*.py")} | {"tests", "support"}
    for name, source in modules_in("lab", "tools", "exercises").items():
        assert not tests & {each.partition(".")[0] for each in imports_of(source)}, name
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for line in [each for each in listed if each.startswith(("lab/", "tools/", "exercises/")) or each.endswith(".md")]:
        runs = r"(?:python|torchrun|bash|sh|node) [^`\n]*" if line.endswith(".md") else ""
        text = (ROOT / line).read_text(encoding="utf-8", errors="replace").replace('" / "', "/")
        assert not (named := re.findall(rf"{runs}\btests/[\w/]+\.\w+", text)), f"{line}: {named}"


def test_what_readers_type_lies_at_the_top_of_tools():
    top = [path for path in (ROOT / "tools").iterdir() if path.is_file() and path.name != "README.md"]
    pages = "".join(path.read_text(encoding="utf-8") for path in ROOT.rglob("*.md") if ".git" not in path.parts)
    assert len(top) <= 18 and not [path.name for path in top if not re.search(
        rf"(python|bash|sudo|\./|`|nproc_per_node \d) ?(tools/)?{re.escape(path.name)}", pages)]
