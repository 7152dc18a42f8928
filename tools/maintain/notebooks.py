"""The notebooks: makes of each text the .ipynb that Colab opens, and runs them.

    python tools/maintain/notebooks.py              writes notebooks/*.ipynb, without outputs
    python tools/maintain/notebooks.py --print      runs all, and writes what they print into notebooks/printed/
    python tools/maintain/notebooks.py --repository https://github.com/NAME/REPOSITORY
                                                    writes the address where the notebooks and the chapters need it
"""

import argparse
import hashlib
import html
import os
import pathlib
import re
import sys
import tempfile
from unittest import mock

import jupytext
import nbformat
from filelock import FileLock
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9]*.md"))
USED = ("lab", "step*", "beyond/step*", "cluster", "same_numbers")  # rooms whose code a notebook runs
FOLDERS = ("IPYTHONDIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")
SECONDS = 300  # that a cell may take, on a machine that others use, too
ADDRESS = re.compile(r'^REPOSITORY = "(.*)"', re.M)
BADGE = re.compile(r"(/assets/notebook\.svg\)\]\()[^)]*?(notebooks/\w+\.ipynb\))")


def read(path: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook that a text is, always the same: its cells are named by their place."""
    notebook = jupytext.read(path, fmt="md:myst")
    notebook.metadata = {"kernelspec": notebook.metadata["kernelspec"]}
    for i, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{i}", {}
    return notebook


def as_ipynb(path: pathlib.Path) -> str:
    return nbformat.writes(read(path)) + "\n"


def run(path: pathlib.Path) -> nbformat.NotebookNode:
    """With its outputs, from a fresh kernel, which leaves nothing in the home directory. Raises ValueError where a cell
    does."""
    notebook = read(path)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, dict.fromkeys(FOLDERS, folder)):
        try:
            NotebookClient(notebook, timeout=SECONDS, coalesce_streams=True,
                           resources={"metadata": {"path": path.parent}}).execute()
        except CellExecutionError as error:
            raise ValueError(f"{path.name}: {error}") from None
    return notebook


def executed(path: pathlib.Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, which are kept until its text, or code that it may run, changes."""
    sources = sorted(source for room in USED for source in ROOT.glob(f"{room}/**/*.py"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in [path, *sources])).hexdigest()
    folder = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or ROOT / "runs", "notebooks")
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{path.stem}-{digest[:16]}.ipynb"
    with FileLock(f"{kept}.lock"):
        if not kept.is_file():
            nbformat.write(run(path), kept)
        return nbformat.read(kept, as_version=4)


def printed(notebook: nbformat.NotebookNode) -> str:
    """What its cells print and show, as text: of HTML the words, without those of pictures."""
    lines = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            words = re.sub("<[^>]+>", "", re.sub("<svg.*?</svg>", "(a picture)", data.get("text/html", ""), flags=re.S))
            text = output.get("text") or html.unescape(words) or data.get("text/plain", "")
            lines += [f"[{cell.id}]", *text.strip().splitlines()]
    return "\n".join(lines) + "\n"


def write_address(address: str) -> None:
    """Where a notebook clones the repository from, and where the chapters' badges lead: Colab opens what lies there."""
    colab = address.replace("https://github.com", "https://colab.research.google.com/github").removesuffix(".git")
    for path in NOTEBOOKS:
        path.write_text(ADDRESS.sub(f'REPOSITORY = "{address}"', path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in [*ROOT.glob("step*/README.md"), *ROOT.glob("beyond/step*/README.md")]:
        text = path.read_text(encoding="utf-8")
        path.write_text(BADGE.sub(rf"\g<1>{colab}/blob/main/\g<2>", text), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="these notebooks only: 08_1f1b")
    parser.add_argument("--print", action="store_true", dest="prints", help="runs them, and keeps what they print")
    parser.add_argument("--repository", metavar="URL", help="the public address of this repository")
    args = parser.parse_args()
    if args.repository:
        write_address(args.repository)
    for path in NOTEBOOKS:
        if args.names and path.stem not in args.names:
            continue
        path.with_suffix(".ipynb").write_text(as_ipynb(path), encoding="utf-8")
        if args.prints:
            text = printed(executed(path))
            (path.parent / "printed" / f"{path.stem}.txt").write_text(text, encoding="utf-8")
            print(f"{path.stem}\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
