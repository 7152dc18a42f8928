"""A function of the course with its body taken out, and the course's own module with the reader's version put in.

A place is written as "data_parallel.Bucket.take": the module, and the function, method or class in it.
"""

import ast
import pathlib
import textwrap
import types
from typing import NamedTuple

from lab.baton import shown

EMPTY = "...  # write this"


class Unwritten(Exception):
    """The reader's file can't be checked. The message says why, and what to do."""


class Place(NamedTuple):
    """Where a function stands: its file, its name in there, and its lines in the file, first and last, from 1."""

    path: pathlib.Path
    name: str
    first: int
    last: int

    def source(self) -> str:
        """The lines, as they are at the left margin of a file."""
        lines = self.path.read_text(encoding="utf-8-sig").splitlines(True)
        return textwrap.dedent("".join(lines[self.first - 1 : self.last]))


def nodes_of(tree: ast.Module, name: str) -> list[ast.AST]:
    """The class or function of this name, after those that contain it. Raises ValueError where it is not there."""
    found: list[ast.AST] = [tree]
    for part in name.split("."):
        inside = [node for node in found[-1].body
                  if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part]
        if not inside:
            raise ValueError(f"there is no {name}")
        found.append(inside[-1])
    return found[1:]


def find(path: pathlib.Path, name: str) -> Place:
    node = nodes_of(ast.parse(path.read_text(encoding="utf-8-sig")), name)[-1]
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return Place(path, name, first, node.end_lineno)


def has_docstring(node: ast.AST) -> bool:
    return isinstance(node.body[0], ast.Expr) and isinstance(getattr(node.body[0].value, "value", None), str)


def take_out(place: Place, statements: tuple[str, ...]) -> str:
    """The source of a place, without those statements that begin with one of these texts, or without all of them.

    All of them are the bodies of its functions, but for docstrings; "def name" is the body of one. Raises ValueError
    where a text begins no statement, or more than one.
    """
    source = place.source()
    lines, (top,) = source.splitlines(), ast.parse(source).body
    functions = [node for node in ast.walk(top) if isinstance(node, ast.FunctionDef)]
    if not statements:
        methods = top.body if isinstance(top, ast.ClassDef) else [top]
        bodies = [node.body[has_docstring(node) :] for node in methods if isinstance(node, ast.FunctionDef)]
        gaps = [(body[0], body[-1]) for body in bodies if body]
    else:
        inside = [node for function in functions for node in ast.walk(function) if isinstance(node, ast.stmt)]
        gaps = []
        for text in statements:
            begin = {node.lineno: node for node in inside if lines[node.lineno - 1].strip().startswith(text)}
            if len(begin) != 1:
                raise ValueError(f"{place.path.name}, {place.name}: {len(begin)} statements begin with {text!r}, not 1")
            for node in begin.values():  # of a method, what comes after its docstring
                is_method = isinstance(node, ast.FunctionDef)
                gaps.append((node.body[has_docstring(node)], node.body[-1]) if is_method else (node, node))
    for first, last in sorted(gaps, key=lambda gap: -gap[0].lineno):
        above = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", ()))]) - 1
        while lines[above - 1].strip().startswith("#"):  # a comment that explains them
            above -= 1
        lines[above : last.end_lineno] = [" " * first.col_offset + EMPTY]
    joined = [line for i, line in enumerate(lines) if i == 0 or line.strip() != EMPTY or lines[i - 1] != line]
    return "\n".join(joined) + "\n"


def read_answer(path: pathlib.Path, name: str) -> ast.Module:
    """The reader's file. Raises Unwritten where it is no Python, lacks the function, or still has an empty place."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8-sig"), str(path))
        compile(tree, str(path), "exec")  # finds more, such as a return outside of a function
    except SyntaxError as error:
        raise Unwritten(f"{shown(path)}, line {error.lineno}, is no Python: {error.msg}") from None
    except FileNotFoundError:
        raise Unwritten(f"there is no {shown(path)} yet: python exercises/try.py start {path.stem}") from None
    except (OSError, ValueError) as error:
        raise Unwritten(f"{shown(path)} can't be read: {error}") from None
    last = name.rpartition(".")[2]
    try:
        (node,) = nodes_of(tree, last)
    except ValueError:
        raise Unwritten(f"{shown(path)} has no {last}, which the course calls: keep its name, or begin again with "
                        f"python exercises/try.py reset {path.stem}") from None
    for part in ast.walk(node):
        if isinstance(part, ast.Expr) and getattr(part.value, "value", None) is ...:
            raise Unwritten(f"{shown(path)}, line {part.lineno}, is still empty: replace the three dots by your lines")
    return tree


def put_in(place: Place, path: pathlib.Path) -> types.CodeType:
    """The module of a place, compiled with the definition in the file `path` instead of its own.

    The file's imports and further functions come before it, as part of the module. Errors name the reader's lines.
    """
    answer = read_answer(path, place.name)
    module = ast.parse(place.path.read_text(encoding="utf-8-sig"))
    nodes, last = nodes_of(module, place.name), place.name.rpartition(".")[2]
    (mine,) = nodes_of(answer, last)
    others = [node for node in answer.body if node is not mine and not isinstance(node, ast.Expr)
              and getattr(node, "module", None) != "__future__"]
    kept = {node.name for node in module.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in others:
        if getattr(node, "name", None) in kept - {place.name}:
            raise Unwritten(f"{shown(path)}, line {node.lineno}: the module has a {node.name} of its own: choose "
                            "another name")
    holder = nodes[-2] if len(nodes) > 1 else module
    holder.body[holder.body.index(nodes[-1])] = mine
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    used = {line for node in others for line in range(
        min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]), node.end_lineno + 1)}
    text = "\n".join(line if number in used else "" for number, line in enumerate(lines, 1))  # on the same lines
    index = module.body.index(nodes[0] if len(nodes) > 1 else mine)
    module.body[index:index] = ast.parse(f"exec(compile({text!r}, {str(path)!r}, 'exec'))").body if others else []
    return with_filename(compile(module, str(place.path), "exec"), place.name.split("."), str(path))


def with_filename(code: types.CodeType, target: list[str], path: str) -> types.CodeType:
    """The same code, in which the definition `target`, with all that is inside, comes from the file `path`."""
    def moved(const, names: list[str]):
        if not isinstance(const, types.CodeType) or names and const.co_name != names[0]:
            return const
        inside = tuple(moved(each, names[1:]) for each in const.co_consts)
        return const.replace(co_filename=const.co_filename if names[1:] else path, co_consts=inside)

    return code.replace(co_consts=tuple(moved(const, target) for const in code.co_consts))
