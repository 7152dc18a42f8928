"""The pages of the site as Markdown that Sphinx reads: links lead to other pages, and a step's page has its diff.

All pages lie in one folder, so that every address is a name. A file of the repository has its place like this:

    step4_tensor_parallel/README.md           step4.html
    step4_tensor_parallel/TOUR.md             tour-4.html
    step4_tensor_parallel/tensor_parallel.py  step4.html#file-tensor_parallel.py, as the step changed it
    step4_tensor_parallel/utils.py            source-step4_tensor_parallel-utils.py.html, as it did not
    tools/steps.py                            source-tools-steps.py.html
    assets/wire.png                           assets-wire.png
"""

import ast
import html
import itertools
import json
import math
import os
import pathlib
import re
import shutil
from collections import Counter

from site_code import diff_html, file_html
from site_tours import tour_text
from steps_compare import compare, find_steps, predecessor
from tours import definitions, find_tours

HERE = pathlib.Path(__file__).resolve().parent
GROUPS = {  # of the navigation -> its pages, in order; a pattern takes those that it finds
    "Course": ("step*/README.md", "playground", "exercises/README.md", "docs/TOUR.md", "docs/WEEK.md", "docs/VIDEOS.md"),
    "Beyond": ("beyond/README.md", "choose", "beyond/step*/README.md"),
    "Your machines": ("cluster/README.md", "cluster/*.md", "docs/FLAGS.md", "docs/LAUNCHERS.md", "docs/LARGE_RUNS.md"),
    "Is your trainer right": ("docs/SAME_NUMBERS.md", "docs/TYPES.md", "docs/DEBUGGING.md", "docs/COMPARING_RUNS.md",
                              "docs/PROFILING.md"),
    "Reference": ("docs/TORCH.md", "docs/BENCHMARKS.md", "step*/*.md", "tools/README.md", "CONTRIBUTING.md"),
}
READ = ("*.md", "beyond/*.md", "exercises/*.md", "cluster/*.md", "docs/*.md", "tools/*.md", "step*/*.md",
        "beyond/step*/*.md")  # all Markdown files are pages
FORMS = {"playground": "Schedule playground", "choose": "How to split"}  # pages that are forms: name -> title
PICTURES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
EXTERNAL = re.compile(r"[a-zA-Z][a-zA-Z+.-]*:|#")
RAW = re.compile(r"^``````\{raw\}.*?^``````$", re.S | re.M)  # see raw()
CODE_ANCHOR = re.compile(r"#(file-|[\w.]+\.py-\d)")  # of a diff
# Code blocks; headings; links and pictures, which may hold one another; code; addresses in HTML.
PIECES = re.compile(r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$|^#+ .*?$"
                    r"|\[(?P<text>(?:`[^`]*`|[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)"
                    r"|(?P<ticks>`+)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
                    r'|\b(?P<attribute>src|href)="(?P<value>[^"]*)"', re.S | re.M)
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
    lines = [f":caption: {caption}"] * bool(caption) + [":hidden:", ":titlesonly:", "", *names]
    return "\n\n```{toctree}\n" + "\n".join(lines) + "\n```\n" if names else ""


class Repository:
    """Writes the pages of the repository at `root` into `out`, and knows the address of each of its files."""

    def __init__(self, root: pathlib.Path, out: pathlib.Path):
        self.root, self.out, self.steps = root, out, find_steps(root)
        self.changes = {n: {name: change for name, change in compare(predecessor(self.steps, n), folder).items()
                            if change.what != "unchanged"} for n, folder in self.steps.items()}
        self.tours = {path.relative_to(root): name for name, path in find_tours(root).items()}
        self.documents = {}  # Markdown file -> the page's name
        numbers = {folder.relative_to(root): n for n, folder in self.steps.items()}
        for path in [path for pattern in READ for path in sorted(root.glob(pattern))]:
            place = path.relative_to(root)
            is_chapter = place.stem == "README" and place.parent in numbers
            name = f"step{numbers[place.parent]}" if is_chapter else (
                place.parent.name if place.stem == "README" else place.stem).lower()
            self.documents[place] = f"tour-{self.tours[place]}" if place in self.tours else name or "index"
        self.exercises = {}
        if (root / "exercises" / "catalogue.py").is_file():
            from catalogue import load

            self.exercises = load()
        self.groups = self.find_groups()
        self.sources: dict[pathlib.Path, str] = {}  # files and folders that have been linked to -> the page's name
        self.index: dict[str, dict[str, str]] = {}  # page -> name of a function -> its line there

    def find_groups(self) -> dict[str, list[str]]:
        """Group -> its pages' names. Raises ValueError for a page that is in none."""
        found = {group: [] for group in GROUPS}
        order = lambda path: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path))]
        left = dict(sorted(self.documents.items(), key=lambda item: order(item[0])))
        for place in [pathlib.Path("README.md"), *(place for place in self.tours if place.parent.name != "docs")]:
            left.pop(place, None)  # the start page, and tours, which stand below their chapters
        for group, patterns in GROUPS.items():
            for pattern in patterns:
                matched = [place for place in left if place.match(pattern) and len(place.parts) == pattern.count("/") + 1]
                found[group] += [left.pop(place) for place in matched] or [pattern] * (pattern in FORMS)
        if left:
            raise ValueError(f"{next(iter(left))} is in no group of the navigation: add it to GROUPS in site_pages.py")
        return found

    def address(self, target: str, folder: pathlib.Path) -> str:
        """Where a link in a file of `folder` leads on the site. Raises ValueError where there is nothing."""
        if EXTERNAL.match(target):
            return target
        path, mark, anchor = target.partition("#")
        place = (folder / path).resolve()
        if not place.exists() or not place.is_relative_to(self.root):
            raise ValueError(f"{folder.relative_to(self.root)}: the link to {target!r} leads to nothing: mend it")
        place = place.relative_to(self.root)
        for document in (place, place / "README.md"):
            if document in self.documents:
                return f"{self.documents[document]}.html{mark}{anchor}"
        if place.parent == folder.relative_to(self.root) / "chapters" and place.stem in self.exercises:
            return f"exercise-{place.stem}.html"
        if place.suffix in PICTURES:
            return self.picture(target, folder)
        number = next((n for n, step in self.steps.items() if step == self.root / place.parent), None)
        if number and place.name in self.changes[number]:
            line = re.match(r"L(\d+)", anchor)
            return f"step{number}.html#{place.name}-{line[1]}" if line else f"step{number}.html#file-{place.name}"
        name = self.sources.setdefault(place, f"source-{'-'.join(place.parts)}")
        return f"{name}.html{mark}{anchor.partition('-')[0]}"

    def picture(self, target: str, folder: pathlib.Path) -> str:
        """Copies a picture beside the pages and returns its name there."""
        path = (folder / target).resolve()
        if EXTERNAL.match(target) or not path.is_file():
            raise ValueError(f"{folder.relative_to(self.root)}: there is no picture {target!r}: mend the link, or keep a "
                             "copy in assets/")
        name = "-".join(path.relative_to(self.root).parts)
        shutil.copyfile(path, self.out / name)
        return name

    def rewrite(self, text: str, folder: pathlib.Path, name=lambda text: None) -> str:
        """Markdown of a file in `folder` with the site's addresses. `name(code)`: that of what a code span names."""
        def renew(match: re.Match) -> str:
            if match["target"]:
                is_picture = text[match.start() - 1 : match.start()] == "!"
                inner = PIECES.sub(renew, match["text"]) if "](" in match["text"] else match["text"]
                if is_picture:
                    assert match["text"], f"the picture {match['target']} has no text for those who can't see it"
                return f"[{inner}]({self.markdown_link(match['target'], folder, is_picture)})"
            if match["attribute"]:
                change = self.picture if match["attribute"] == "src" else self.address
                return f'{match["attribute"]}="{html.escape(change(html.unescape(match["value"]), folder))}"'
            if match["code"] and (address := name(match["code"])):
                return f"[{match[0]}](page:{address})"
            return match[0]

        return PIECES.sub(renew, text)

    def markdown_link(self, target: str, folder: pathlib.Path, is_picture: bool) -> str:
        """As Sphinx wants it: pages by their file, whose anchors it then checks, code by an address that it leaves."""
        if is_picture:
            return self.picture(target, folder)
        address = self.address(target, folder)
        page, _, anchor = address.partition(".html")
        is_page = page in self.documents.values() or page.startswith("exercise-")
        if EXTERNAL.match(address) or not is_page or CODE_ANCHOR.match(anchor):
            return address if EXTERNAL.match(address) else f"page:{address}"
        return f"{page}.md{anchor}"

    def write(self, name: str, text: str) -> None:
        (self.out / f"{name}.md").write_text(text, encoding="utf-8")

    def write_words(self) -> None:
        """What the search needs: words that lead to a page, and how often the pages use theirs."""
        for line in (HERE / "words.txt").read_text(encoding="utf-8").splitlines():
            place, _, words = line.partition(": ")
            page, _, anchor = place.partition("#")
            if (self.out / f"{page}.md").is_file():
                self.index.setdefault(page, {}).update(dict.fromkeys(words.split(", "), anchor))
        for page in {f"step{one.chapter}" for one in self.exercises.values()} & {*self.index}:
            self.index[page] |= dict.fromkeys((f"exercise {page[4:]}", f"exercises of step {page[4:]}"), "write-it-yourself")
        for name in self.exercises:
            self.index[f"exercise-{name}"] = {name: ""}
        counts = {path.stem: Counter(re.findall(r"[a-z_]\w{2,}", RAW.sub("", path.read_text(encoding="utf-8")).lower()))
                  for path in self.out.glob("*.md") if not path.name.startswith("source-")}
        pages = Counter(itertools.chain(*counts.values()))  # word -> how many pages have it
        weights = {page: {word: weight for word, n in words.items()
                          if (weight := round(20 * math.log(len(counts) / pages[word]) * n / (n + 3)))}
                   for page, words in counts.items()}
        (self.out / "words.json").write_text(json.dumps(self.index), encoding="utf-8")
        scorer = f"const WEIGHTS = {json.dumps(weights)};\n{(HERE / 'search.js').read_text(encoding='utf-8')}"
        (self.out / "scorer.js").write_text(scorer, encoding="utf-8")

    def write_all(self, films: dict[str, str], forms: dict[str, str]) -> int:
        """Writes all pages, and returns how many. `films`: tour -> HTML that shows its film; `forms`: page -> HTML."""
        for place, page in self.documents.items():
            folder, text = self.root / place.parent, (self.root / place).read_text(encoding="utf-8")
            number = next((n for n in self.steps if page == f"step{n}"), None)
            if place in self.tours:
                text = tour_text(self, place, films.get(self.tours[place], ""))
            elif number:
                text = self.step_text(number, text)
            else:
                text = self.rewrite(text, folder, self.exercise_address)
            tours = [self.documents[tour] for tour in self.tours if tour.parent == place.parent != pathlib.Path("docs")]
            below = tours if place.name == "README.md" else []
            below += [f"exercise-{name}" for name in self.exercises] if page == "exercises" else []
            if page == "index":
                below, text = [], text + "".join(toctree(names, group) for group, names in self.groups.items())
            self.write(page, text + toctree(below))
        for name, one in self.exercises.items():
            self.write(f"exercise-{name}", self.exercise_text(name, one))
        for name, text in forms.items():
            self.write(name, f"# {FORMS[name]}" + raw(text))
        done = set()
        while todo := self.sources.keys() - done:  # the page of a folder links to further files
            for place in sorted(todo):
                self.write(self.sources[place], f"---\norphan: true\nnosearch: true\n---\n\n# {place.as_posix()}"
                           + self.source_text(self.root / place))
            done |= todo
        self.write_words()
        return len([*self.out.glob("*.md")])

    def exercise_address(self, name: str) -> str | None:
        """The address of an exercise's page, None where there is no exercise of this name."""
        return f"exercise-{name}.html" if name in self.exercises else None

    def step_text(self, number: int, chapter: str) -> str:
        """A chapter, whose words in backticks lead to what they name, and the diff of its step."""
        folder, changes, defined = self.steps[number], self.changes[number], {}
        before = predecessor(self.steps, number)
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
            return f"step{number}.html#{anchor}" if anchor else self.exercise_address(code)

        self.index[f"step{number}"] = {word: places[0][1] for word, places in defined.items()
                                       if len(places) == 1 and places[0][0]}
        text = self.rewrite(chapter, folder, find) + "\n\n## The diff to the step before\n\n" + (
            f"What this step changes in `{before.name}`: old lines are red, new ones green." if before
            else "All files of the first step are new.")
        same = [f"[`{path.name}`](page:{self.address(path.name, folder)})" for path in sorted(folder.glob("*.py"))
                if path.name not in changes]
        text += f" Unchanged files: {', '.join(same)}." if same else ""
        for name, diff in drawn.items():
            text += raw(f'<span id="file-{html.escape(name)}"></span>') + (
                f"### `{name}`\n\n{changes[name].what.capitalize()}, {changes[name].counts}.") + raw(diff)
        return text

    def exercise_text(self, name: str, one) -> str:
        """The task, what the reader starts with, and, folded, hints and the course's solution."""
        from blanks import find, take_out
        from catalogue import source_path

        folder, place = self.root / "exercises", find(source_path(one), one.name_in_module)
        file, chapter = os.path.relpath(place.path, folder), f"[{one.chapter}](../{one.chapter}/README.md)"
        if one.chapter.isdigit():
            step = self.steps[int(one.chapter)].relative_to(self.root)
            chapter = f"[step {one.chapter}](../{step}/README.md)"
        title, _, task = one.task.partition("\n")
        return self.rewrite(EXERCISE.format(
            title=title.rstrip("."), chapter=chapter, name=name, task=task, stub=take_out(place, one.blank),
            hints="\n\n".join(HINT.format(i, hint) for i, hint in enumerate(one.hints, 1)), solution=place.source(),
            where=f"{file.removeprefix('../')}, {one.name_in_module}", address=f"{file}#L{place.first}"), folder)

    def source_text(self, path: pathlib.Path) -> str:
        """A file with line numbers, or a table of a folder's files with the first line of what each says of itself."""
        if not path.is_dir():
            return raw(file_html(path))
        rows = []
        for child in sorted(child for child in path.iterdir() if child.suffix in (".py", ".sh", ".json")):
            says = ast.get_docstring(ast.parse(child.read_text(encoding="utf-8"))) if child.suffix == ".py" else ""
            rows.append(f"| [`{child.name}`](page:{self.address(child.name, path)}) | {(says or '').partition(chr(10))[0]} |")
        return "\n\n" + "\n".join(["| file | what it does |", "| --- | --- |", *rows])
