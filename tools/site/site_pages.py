"""The pages of the site as Markdown that Sphinx reads: links lead to other pages, and a step's page has its diff."""

import ast
import html
import os
import pathlib
import re
import shutil

from site_code import diff_html, file_html
from site_links import FORMS, Repository
from site_search import write_search
from site_tours import tour_text

from course.steps_compare import predecessor
from course.tours import definitions

EXERCISE = """# {title}

{chapter} · [all exercises](README.md) · `{name}`

{task}

## Begin

```bash
python exercises/try.py start {name}
```

writes this into `exercises/mine/{name}.py`, for you to fill in:

```python
{stub}```

```bash
python exercises/try.py check {name}
```

{hints}

<details><summary>The course's own</summary>

[{where}]({address})

```python
{solution}```

</details>
"""
HINT = "<details><summary>Hint {}</summary>\n\n{}\n\n</details>"


def raw(text: str) -> str:
    """HTML as a block of a page."""
    return f"\n\n``````{{raw}} html\n{text}\n``````\n\n"


def toctree(names: list[str], caption: str = "") -> str:
    """What stands below a page in the navigation."""
    lines = [f":caption: {caption}"] * bool(caption) + [":hidden:", ":titlesonly:", "", *names]
    return "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n" if names else ""


def write_pages(repository: Repository, films: dict[str, str], forms: dict[str, str]) -> int:
    """Writes all pages, and returns how many. `films`: tour -> its film; `forms`: page -> its HTML."""
    pages, index, groups = {}, {}, repository.groups()  # which refuses a page that is in none, before notebooks run
    for place, page in repository.documents.items():
        folder, text = repository.root / place.parent, (repository.root / place).read_text(encoding="utf-8")
        below = [f"exercise-{name}" for name in repository.exercises] * (page == "exercises")
        if place in repository.notebooks:
            pages[page] = notebook_text(repository, place)
        elif place in repository.tours:
            pages[page] = tour_text(repository, place, films.get(repository.tours[place], ""))
        elif page.removeprefix("step").isdigit():
            pages[page], index[page] = step_text(repository, int(page.removeprefix("step")), text)
        else:
            pages[page] = repository.rewrite(text, folder)
        if place.name == "README.md" and page != "index":
            below += [repository.documents[tour] for tour in repository.tours if tour.parent == place.parent]
        pages[page] += toctree(below)
    pages["index"] += "".join(toctree(names, group) for group, names in groups.items())
    pages |= {f"exercise-{name}": exercise_text(repository, one) for name, one in repository.exercises.items()}
    pages |= {name: f"# {FORMS[name]}" + raw(text) for name, text in forms.items()}
    write_search(repository, pages, index)
    while todo := {place for place, name in repository.sources.items() if name not in pages}:
        for place in sorted(todo):  # the page of a folder links to further files
            name = repository.sources[place]
            pages[name] = f"---\norphan: true\nnosearch: true\n---\n\n# {place.as_posix()}" + (
                source_text(repository, repository.root / place))
    for name, text in pages.items():
        (repository.out / f"{name}.md").write_text(text, encoding="utf-8")
    return len(pages)


def step_text(repository: Repository, number: int, chapter: str) -> tuple[str, dict[str, str]]:
    """A chapter, whose words in backticks lead to what they name, and the diff of its step; and what that defines, name
    -> anchor."""
    folder, changes, defined = repository.steps[number], repository.changes[number], {}
    before = predecessor(repository.steps, number)
    drawn = {name: diff_html(before, folder, name, changes[name]) for name in
             sorted(changes, key=lambda name: (("new", "changed", "removed").index(changes[name].what), name))}
    for name in [name for name in drawn if changes[name].what != "removed"]:
        added = {int(k) for k in re.findall(r'class="new"><a class="ln" id="[^"]+-(\d+)"', drawn[name])}
        for what, (first, last) in definitions((folder / name).read_text(encoding="utf-8")).items():
            is_new = changes[name].what == "new" or not added.isdisjoint(range(first, last + 1))
            for word in {what, what.rpartition(".")[2]}:  # a method by its own name, too
                defined.setdefault(word, []).append((is_new, f"{name}-{first}"))

    def find(code: str) -> str | None:
        """The address of what a code span names, if it is one place of the diff. What the step changed counts."""
        places = defined.get(re.sub(r"\(.*\)$", "", code, flags=re.S), [])
        places = [place for place in places if place[0]] or places
        anchor = f"file-{code}" if code in drawn else places[0][1] if len(places) == 1 else None
        return f"step{number}.html#{anchor}" if anchor else repository.exercise_address(code)

    text = repository.rewrite(chapter, folder, find) + "\n\n## The diff to the step before\n\n" + (
        f"What this step changes in `{before.name}`: old lines are red, new ones green." if before
        else "All files of the first step are new.")
    same = [f"[`{path.name}`](page:{repository.address(path.name, folder)})" for path in sorted(folder.glob("*.py"))
            if path.name not in changes]
    text += f" Unchanged files: {', '.join(same)}." if same else ""
    for name, diff in drawn.items():
        text += raw(f'<span id="file-{html.escape(name)}"></span>') + (
            f"### `{name}`\n\n{changes[name].what.capitalize()}, {changes[name].counts}.") + raw(diff)
    return text, {word: places[0][1] for word, places in defined.items() if len(places) == 1 and places[0][0]}


def exercise_text(repository: Repository, one) -> str:
    """The task, what the reader starts with, and, folded, hints and the course's solution."""
    from blanks import find, take_out
    from catalogue import source_path

    folder, place = repository.root / "exercises", find(source_path(one), one.name_in_module)
    file, chapter = os.path.relpath(place.path, folder), f"[{one.chapter}](../{one.chapter}/README.md)"
    if one.chapter.isdigit():
        step = repository.steps[int(one.chapter)].relative_to(repository.root)
        chapter = f"[step {one.chapter}](../{step}/README.md)"
    title, _, task = one.task.partition("\n")
    return repository.rewrite(EXERCISE.format(
        title=title.rstrip("."), chapter=chapter, name=one.name, task=task, stub=take_out(place, one.blank),
        hints="\n\n".join(HINT.format(i, hint) for i, hint in enumerate(one.hints, 1)), solution=place.source(),
        where=f"{file.removeprefix('../')}, {one.name_in_module}", address=f"{file}#L{place.first}"), folder)


def notebook_text(repository: Repository, place: pathlib.Path) -> str:
    """Its words, its code and, from a run, what that prints and shows."""
    from maintain.notebooks import executed

    path, parts = repository.root / place, []
    for cell in executed(path).cells:
        if cell.cell_type == "markdown":
            parts.append(repository.rewrite(cell.source, path.parent))
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            parts.append(raw(data["text/html"]) if "text/html" in data else
                         f"```\n{(output.get('text') or data['text/plain']).rstrip()}\n```")
    shutil.copyfile(path.with_suffix(".ipynb"), repository.out / f"{path.stem}.ipynb")
    return "\n\n".join([*parts, f"{{download}}`This notebook, to run and to change <{path.stem}.ipynb>`"])


def source_text(repository: Repository, path: pathlib.Path) -> str:
    """A file with line numbers, or a table of a folder's files with the first line of what each says of itself."""
    if not path.is_dir():
        return raw(file_html(path))
    rows = []
    for child in sorted(child for child in path.iterdir() if child.suffix in (".py", ".sh", ".json")):
        says = ast.get_docstring(ast.parse(child.read_text(encoding="utf-8"))) if child.suffix == ".py" else ""
        says = (says or "").partition("\n")[0]
        rows.append(f"| [`{child.name}`](page:{repository.address(child.name, path)}) | {says} |")
    return "\n\n" + "\n".join(["| file | what it does |", "| --- | --- |", *rows])
