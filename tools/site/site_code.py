"""Source code for the site: highlighted lines.

Pygments tells words, strings and comments apart. The site knows eight kinds of them, as classes of one letter:
k keyword, s string, c comment, n number, f a name that is defined here, d decorator, b built-in, o operator word.
"""

import functools
import html

from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.lexers.special import TextLexer
from pygments.token import Comment, Keyword, Name, Number, Operator, String
from pygments.util import ClassNotFound

LETTERS = ((Comment, "c"), (String, "s"), (Number, "n"), (Operator.Word, "o"), (Keyword, "k"), (Name.Function, "f"),
           (Name.Class, "f"), (Name.Decorator, "d"), (Name.Builtin, "b"), (Name.Exception, "b"))
Line = list[tuple[str, str]]  # (letter or "", text) of each token


def find_lexer(name: str):
    """Pygments' lexer for a file name or for the language of a code block; plain text where it has none."""
    for find in (get_lexer_for_filename, get_lexer_by_name):
        try:
            return find(name, stripnl=False, ensurenl=False)
        except ClassNotFound:
            continue
    return TextLexer(stripnl=False, ensurenl=False)


@functools.cache  # a file stands in the scenes of tours and in diffs
def tokens_by_line(text: str, name: str) -> list[Line]:
    """The tokens of each line of a file, or of a code block in the language `name`."""
    lines: list[Line] = [[]]
    for kind, value in find_lexer(name).get_tokens(text):
        letter = next((letter for token, letter in LETTERS if kind in token), "")
        first, *others = value.split("\n")
        lines[-1].append((letter, first))
        lines += [[(letter, part)] for part in others]
    return lines[:-1] if text.endswith("\n") else lines


def line_html(line: Line, marks: list[tuple[int, int]] = ()) -> str:
    """A line as HTML; `marks` are ranges of characters that differ from the line beside it."""
    edges, parts, start = sorted({edge for mark in marks for edge in mark}), [], 0
    for letter, text in line:
        stop = start + len(text)
        cuts = [start, *(edge for edge in edges if start < edge < stop), stop]
        for a, b in zip(cuts, cuts[1:]):
            piece = html.escape(text[a - start : b - start], quote=False)
            if any(first <= a < last for first, last in marks):
                piece = f"<mark>{piece}</mark>"
            parts.append(f'<span class="{letter}">{piece}</span>' if letter and piece else piece)
        start = stop
    return "".join(parts)
