"""The notebooks: what Colab opens is made of the text, and in a fresh kernel they print what stands in printed/."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys

import lab
import pytest
from lab.launch import ROOT, STEPS

for library in ("jupytext", "nbclient", "ipykernel"):
    pytest.importorskip(library, reason="notebooks need pip install -e '.[docs]'")

from maintain import notebooks
from maintain.notebooks import ADDRESS, NOTEBOOKS, as_ipynb, executed, printed, read

CHAPTERS = ["02", "03", "04", "05", "06", "07", "08", "09", "10", "12", "14", "16"]
QUICK = "02_ranks"
EACH = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(path) -> list[str]:
    return [cell.source for cell in read(path).cells if cell.cell_type == "code"]


def test_each_chapter_has_its_notebook_and_nothing_is_left_over():
    names = [path.stem for path in NOTEBOOKS]
    assert [name[:2] for name in names] == CHAPTERS
    for pattern in ("*.ipynb", "printed/*.txt"):
        assert sorted(path.stem for path in (ROOT / "notebooks").glob(pattern)) == names


@EACH
def test_ipynb_is_made_of_the_text(path):
    text = path.with_suffix(".ipynb").read_text(encoding="utf-8")
    assert text == as_ipynb(path), f"{path.stem}.ipynb differs from its text: python tools/maintain/notebooks.py"


@EACH
def test_a_notebook_has_one_idea_and_calls_public_names(path):
    cells, text = read(path).cells, path.read_text(encoding="utf-8")
    assert len(cells) <= 12 and all(word in text for word in ("**The idea.**", "\n## Predict", "\n## Change", "<details>"))
    assert code(path)[0] == code(NOTEBOOKS[0])[0], "all have the same first cell"
    chapter = next(ROOT.glob(f"**/step{int(path.stem[:2])}_*/README.md")).read_text(encoding="utf-8")
    assert f"notebooks/{path.stem}.ipynb)" in chapter, "its chapter has no badge"
    for node in ast.walk(ast.parse("\n".join(code(path)[1:]))):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "lab":
            assert node.module == "lab" and {name.name for name in node.names} <= {*lab.__all__}
        assert not (isinstance(node, ast.Attribute) and node.attr.startswith("_")), node.attr


def test_the_first_cell_finds_the_repository_or_clones_it(tmp_path, monkeypatch):
    [cell, *_], commands = code(NOTEBOOKS[0]), []
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT / "notebooks")
    exec(cell, found := {})
    assert found["found"] == [ROOT]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    with pytest.raises(AssertionError, match="write the address of the repository into REPOSITORY"):
        exec(ADDRESS.sub('REPOSITORY = ""', cell), {})
    exec(ADDRESS.sub('REPOSITORY = "https://a.b/c"', cell), found := {})
    assert commands[0] == ["git", "clone", "-q", "--depth", "1", "https://a.b/c", "course"]
    assert commands[1][1:] == ["-m", "pip", "install", "-q", "-e", "course"] and found["found"] == [tmp_path / "course"]


def test_the_address_is_written_where_it_is_needed(tmp_path, monkeypatch):
    for name in ("notebooks/08_1f1b.md", "step8_pipeline_parallel_1f1b/README.md", "beyond/step12_zero/README.md"):
        (tmp_path / name).parent.mkdir(parents=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "NOTEBOOKS", [tmp_path / "notebooks" / "08_1f1b.md"])
    for name in ("first", "second"):
        notebooks.write_address(f"https://github.com/{name}/course")
        assert f'REPOSITORY = "https://github.com/{name}/course"' in (tmp_path / "notebooks/08_1f1b.md").read_text()
        for chapter, book in (("step8_pipeline_parallel_1f1b", "08_1f1b"), ("beyond/step12_zero", "12_zero")):
            address = f"(https://colab.research.google.com/github/{name}/course/blob/main/notebooks/{book}.ipynb)"
            assert address in (tmp_path / chapter / "README.md").read_text()


@pytest.mark.slow(drawn=6)
@pytest.mark.parametrize("step", [step for step in STEPS if step != "1"])
def test_the_command_of_each_chapter_runs(step):
    words = re.search(r"`python -m lab (.*?)`", (STEPS[step] / "README.md").read_text(encoding="utf-8"))[1].split(" ", 1)
    result = lab.look(*words)
    assert words[0] == step and result.rows


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem, marks=() if path.stem == QUICK else pytest.mark.slow)
                                  for path in reversed(NOTEBOOKS)])  # the site runs them in their order, and both keep
def test_a_fresh_kernel_prints_what_it_printed(path):
    text = (path.parent / "printed" / f"{path.stem}.txt").read_text(encoding="utf-8")
    assert printed(executed(path)) == text, f"python tools/maintain/notebooks.py --print {path.stem}"
