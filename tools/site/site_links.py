"""Addresses of the site, and Markdown that leads to them.

All pages lie in one folder, so that every address is a name. A file of the repository has its place like this:

    step4_tensor_parallel/README.md           step4.html
    step4_tensor_parallel/TOUR.md             tour-4.html
    step4_tensor_parallel/tensor_parallel.py  step4.html#file-tensor_parallel.py, as the step changed it
    step4_tensor_parallel/utils.py            source-step4_tensor_parallel-utils.py.html, as it did not
    notebooks/08_1f1b.md, 08_1f1b.ipynb       08_1f1b.html
    tools/steps.py                            source-tools-steps.py.html
    assets/wire.png                           assets-wire.png
"""

import html
import pathlib
import re
import shutil

from course.steps_compare import compare, find_steps, predecessor
from course.tours import find_tours

GROUPS = {  # of the navigation -> its pages, in order; a pattern takes those that it finds
    "Course": ("step*/README.md", "playground", "exercises/README.md", "docs/TOUR.md", "docs/WEEK.md",
               "docs/VIDEOS.md"),
    "Laboratory": ("docs/LAB*.md", "notebooks/README.md", "notebooks/[0-9]*.md"),
    "Beyond": ("beyond/README.md", "choose", "beyond/step*/README.md"),
    "Your machines": ("cluster/README.md", "cluster/*.md", "docs/FLAGS.md", "docs/LAUNCHERS.md", "docs/LARGE_RUNS.md",
                      "docs/LOW_PRECISION.md"),
    "Is your trainer right": ("docs/SAME_NUMBERS.md", "docs/MUSEUM.md", "docs/FOUND.md", "docs/SCOREBOARD.md",
                              "same_numbers/*.md", "docs/TYPES.md", "docs/DEBUGGING.md", "docs/COMPARING_RUNS.md",
                              "docs/PROFILING.md"),
    "Reference": ("docs/TORCH.md", "docs/BENCHMARKS.md", "step*/*.md", "tools/README.md", "CONTRIBUTING.md"),
}
FORMS = {"playground": "Schedule playground", "choose": "How to split"}  # pages that are forms: name -> title
FOLDERS = ("", "[a-z]*/", "beyond/step*/")  # all Markdown files in them are pages
PICTURES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
EXTERNAL = re.compile(r"[a-zA-Z][a-zA-Z+.-]*:|#")
CODE_ANCHOR = re.compile(r"#(file-|[\w.]+\.py-\d)")  # of a diff
# Code blocks; headings; links and pictures, which may hold one another; code; addresses in HTML.
PIECES = re.compile(r"^ *(?P<fence>```+|~~~+).*?^ *(?P=fence) *$|^#+ .*?$"
                    r"|\[(?P<text>(?:`[^`]*`|[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)"
                    r"|(?P<ticks>`+)(?P<code>.+?)(?<!`)(?P=ticks)(?!`)"
                    r'|\b(?P<attribute>src|href)="(?P<value>[^"]*)"', re.S | re.M)


class Repository:
    """The repository at `root`: its steps, its pages, and the address of each of its files. Pictures go into `out`."""

    def __init__(self, root: pathlib.Path, out: pathlib.Path):
        self.root, self.out, self.steps = root, out, find_steps(root)
        self.changes = {n: {name: change for name, change in compare(predecessor(self.steps, n), folder).items()
                            if change.what != "unchanged"} for n, folder in self.steps.items()}
        self.tours = {path.relative_to(root): name for name, path in find_tours(root).items()}
        self.documents = {pathlib.Path("README.md"): "index"}  # Markdown file -> the page's name
        self.documents |= {folder.relative_to(root) / "README.md": f"step{n}" for n, folder in self.steps.items()}
        self.documents |= {place: f"tour-{name}" for place, name in self.tours.items()}
        for path in [path for folder in FOLDERS for path in sorted(root.glob(f"{folder}*.md"))]:
            name = path.parent.name if path.stem == "README" else path.stem
            if (place := path.relative_to(root)) not in self.documents:
                is_taken = name.lower() in self.documents.values()
                self.documents[place] = "-".join(place.with_suffix("").parts if is_taken else [name]).lower()
        self.notebooks = [place for place in self.documents if (root / place).with_suffix(".ipynb").is_file()]
        self.exercises = {}
        if (root / "exercises" / "catalogue.py").is_file():
            from catalogue import load

            self.exercises = load()
        self.sources: dict[pathlib.Path, str] = {}  # files and folders that have been linked to -> the page's name

    def groups(self) -> dict[str, list[str]]:
        """Group of the navigation -> its pages. Raises ValueError for a page that is in none.

        The start page is above them, and a tour below its chapter.
        """
        left = {place: page for place, page in self.documents.items()
                if page != "index" and (place not in self.tours or place.parent.name == "docs")}
        found = {group: [] for group in GROUPS}
        for group, patterns in GROUPS.items():
            for pattern in patterns:
                taken = [place for place in left if place.match(pattern) and len(place.parts) == pattern.count("/") + 1]
                found[group] += [left.pop(place) for place in taken] or [pattern] * (pattern in FORMS)
        if left:
            raise ValueError(f"{next(iter(left))} is in no group of the navigation: add it to GROUPS in site_links.py")
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
        for document in (place, place / "README.md", *[place.with_suffix(".md")] * (place.suffix == ".ipynb")):
            if document in self.documents:
                return f"{self.documents[document]}.html{mark}{anchor}"
        if place.suffix in PICTURES:
            return self.picture(target, folder)
        number = next((n for n, step in self.steps.items() if step == self.root / place.parent), None)
        if number and place.name in self.changes[number]:
            line = re.match(r"L(\d+)", anchor)
            return f"step{number}.html#{place.name}-{line[1]}" if line else f"step{number}.html#file-{place.name}"
        name = self.sources.setdefault(place, f"source-{'-'.join(place.parts)}")
        return f"{name}.html{mark}{anchor.partition('-')[0]}"

    def exercise_address(self, name: str) -> str | None:
        """The address of an exercise's page, None where there is no exercise of this name."""
        return f"exercise-{name}.html" if name in self.exercises else None

    def picture(self, target: str, folder: pathlib.Path) -> str:
        """Copies a picture beside the pages and returns its name there."""
        path = (folder / target).resolve()
        if EXTERNAL.match(target) or not path.is_file():
            raise ValueError(f"{folder.relative_to(self.root)}: there is no picture {target!r}: mend the link, or "
                             "keep a copy in assets/")
        name = "-".join(path.relative_to(self.root).parts)
        shutil.copyfile(path, self.out / name)
        return name

    def rewrite(self, text: str, folder: pathlib.Path, name=None) -> str:
        """Markdown of a file in `folder` with the site's addresses.

        `name(code)` is the address of what a code span names, or None; if left out, it knows the exercises.
        """
        def renew(match: re.Match) -> str:
            if match["target"] and match.string[: match.start()].endswith("!"):
                assert match["text"], f"the picture {match['target']} has no text for those who can't see it"
                return f"[{match['text']}]({self.picture(match['target'], folder)})"
            if match["target"]:
                inner = PIECES.sub(renew, match["text"]) if "](" in match["text"] else match["text"]
                return f"[{inner}]({self.markdown_link(match['target'], folder)})"
            if match["attribute"]:
                change = self.picture if match["attribute"] == "src" else self.address
                return f'{match["attribute"]}="{html.escape(change(html.unescape(match["value"]), folder))}"'
            if match["code"] and (address := (name or self.exercise_address)(match["code"])):
                return f"[{match[0]}](page:{address})"
            return match[0]

        return PIECES.sub(renew, text)

    def markdown_link(self, target: str, folder: pathlib.Path) -> str:
        """As Sphinx wants it: pages by their file, whose anchors it then checks, code by an address that it leaves."""
        address = self.address(target, folder)
        page, _, anchor = address.partition(".html")
        if EXTERNAL.match(address):
            return address
        return f"{page}.md{anchor}" if page in self.documents.values() and not CODE_ANCHOR.match(anchor) else (
            f"page:{address}")
