"""The pages of the exercises: the task, what the reader starts with, and, folded, hints and the course's solution."""

import os

from site_markdown import Document
from site_pages import Page, Repository

PAGE = """# {title}

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


def exercise_pages(repository: Repository) -> list[Page]:
    """One page for each exercise of the repository, in the order of the chapters."""
    from blanks import find, take_out
    from catalogue import source_path

    pages, folder = [], repository.root / "exercises"
    for name, one in repository.exercises.items():
        place = find(source_path(one), one.name_in_module)
        file, chapter = os.path.relpath(place.path, folder), f"[{one.chapter}](../{one.chapter}/README.md)"
        if one.chapter.isdigit():
            step = repository.steps[int(one.chapter)].relative_to(repository.root)
            chapter = f"[step {one.chapter}](../{step}/README.md)"
        title, _, task = one.task.partition("\n")
        text = PAGE.format(
            title=title.rstrip("."), chapter=chapter, name=name, task=task, stub=take_out(place, one.blank),
            hints="\n\n".join(HINT.format(i, hint) for i, hint in enumerate(one.hints, 1)), solution=place.source(),
            where=f"{file.removeprefix('../')}, {one.name_in_module}", address=f"{file}#L{place.first}")
        document = Document(text, repository, folder)
        pages.append(Page(repository.exercise_address(name), "", document.title, [], "document.html",
                          {"body": document.html}))
    return pages
