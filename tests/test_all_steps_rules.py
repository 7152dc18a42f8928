"""The steps keep the rules and budgets that `tools/steps.py check` knows."""

import ast
import re

import steps
from lab.launch import ROOT

STANDARD_LIBRARY = {"_asdict", "_fields", "_replace", "_exit", "_run_exitfuncs", "_current_frames", "_getframe"}


def private_names(tree: ast.AST):
    """Yields what a module uses that begins with an underscore: attributes, by getattr too, and what is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            yield from [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            paths = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from [part for path in paths for part in path.split(".")]


def test_private_names_of_other_packages_are_listed():
    """In CONTRIBUTING.md: each name of a package that it does not promise to keep, and nothing that is not used. What
    is about one version of a package (found/, the scoreboard) may use any."""
    defined, used = set(), {}
    for path in [path for room in ("step*", "beyond/step*", "cluster", "exercises", "same_numbers", "lab", "tools")
                 for folder in ROOT.glob(room) for path in folder.rglob("*.py") if not {"mine", "found", "board"} & {*path.parts}]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        defined |= {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        defined |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)
                    and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self"}
        used |= {name: path for name in private_names(tree) if re.match("_[a-zA-Z]", str(name))}
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(_\w+)`", page))
    others = used.keys() - defined - STANDARD_LIBRARY
    assert not others - listed, {name: str(used[name]) for name in others - listed}
    assert not listed - others, f"{listed - others} is used no longer: take it from CONTRIBUTING.md"


def test_steps_keep_the_rules(capsys):
    assert steps.main(["check"]) == 0, capsys.readouterr()
