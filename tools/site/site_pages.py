"""The pages of the site: one a step, from its chapter and its diff, and one for each other Markdown file and source.

All pages lie in one folder, so that every address is a name. A file of the repository has its place like this:

    step4_tensor_parallel/README.md           step4.html
    step4_tensor_parallel/TOUR.md             tour-4.html
    step4_tensor_parallel/tensor_parallel.py  step4.html#file-tensor_parallel.py, as the step changed it
    step4_tensor_parallel/utils.py            source-step4_tensor_parallel-utils.py.html, as it did not
    tools/steps.py                            source-tools-steps.py.html
    assets/wire.png                           assets-wire.png
"""

import ast
import pathlib
import re
import shutil
from typing import NamedTuple

from site_code import line_html, tokens_by_line
from site_diff import Drawing, diff_step
from site_markdown import Document, Heading
from site_tours import tour_content
from steps_compare import find_steps, predecessor
from tours import definitions, find_tours, read_tour

PICTURES = (".png", ".svg", ".jpg", ".jpeg", ".gif", ".webp")
EXTERNAL = re.compile(r"[a-zA-Z][a-zA-Z+.-]*:")


GROUPS = ("Course", "Beyond", "Your machines", "Reference")  # of the navigation
ROOMS = {"beyond": "Beyond", "cluster": "Your machines", "docs": "Reference", "tools": "Reference"}


class Page(NamedTuple):
    """`label`: in the navigation, under the title `group`; `content`: what its template shows besides."""

    address: str
    label: str
    title: str
    headings: list[Heading]
    template: str
    content: dict
    group: str = GROUPS[0]


class Repository:
    """What addresses need to know: steps, their diffs, Markdown files; and what else has been linked to."""

    def __init__(self, root: pathlib.Path, out: pathlib.Path):
        self.root, self.out, self.steps = root, out, find_steps(root)
        self.diffs = {n: diff_step(predecessor(self.steps, n), folder) for n, folder in self.steps.items()}
        self.documents = {pathlib.Path("README.md"): "index.html"}
        self.tours = {path.relative_to(root): f"tour-{name}.html" for name, path in find_tours(root).items()}
        self.documents |= {folder.relative_to(root) / "README.md": f"step{n}.html" for n, folder in self.steps.items()}
        self.documents |= self.tours
        rooms = [page for room in ("beyond", "exercises", "cluster", "docs", "tools", "step9_heterogeneous_pp")
                 for page in sorted(root.glob(f"{room}/*.md"), key=lambda page: (page.stem != "README", page.name))]
        for path in filter(pathlib.Path.is_file, [*rooms, root / "CONTRIBUTING.md"]):
            place = path.relative_to(root)
            name = place.parent.name if place.stem == "README" else place.stem
            self.documents.setdefault(place, f"{name.lower()}.html")
        self.exercises = find_exercises(root)
        self.sources: dict[pathlib.Path, str] = {}  # files and folders that have been linked to -> address

    def address(self, target: str, folder: pathlib.Path) -> str:
        """Where a link in a file of `folder` leads on the site. Raises ValueError where there is nothing."""
        if EXTERNAL.match(target) or target.startswith("#"):
            return target
        path, mark, anchor = target.partition("#")
        place = (folder / path).resolve()
        if not place.exists() or not place.is_relative_to(self.root):
            raise ValueError(f"{folder.relative_to(self.root)}: the link to {target!r} leads to nothing: mend it")
        place = place.relative_to(self.root)
        for document in (place, place / "README.md"):
            if document in self.documents:
                return self.documents[document] + mark + anchor
        if place.suffix in PICTURES:
            return self.picture(target, folder)
        number = next((n for n, step in self.steps.items() if step.relative_to(self.root) == place.parent), None)
        if number and any(diff.name == place.name for diff in self.diffs[number]):
            line = re.match(r"L(\d+)", anchor)
            return f"step{number}.html#{place.name}-{line[1]}" if line else f"step{number}.html#file-{place.name}"
        return self.source(place) + mark + anchor.partition("-")[0]

    def exercise_address(self, name: str) -> str | None:
        """The address of an exercise's page, None where there is no exercise of this name."""
        return f"exercise-{name}.html" if name in self.exercises else None

    def source(self, place: pathlib.Path) -> str:
        """The address of a file or folder, which gets a page of its own."""
        return self.sources.setdefault(place, f"source-{'-'.join(place.parts)}.html")

    def picture(self, target: str, folder: pathlib.Path) -> str:
        """Copies a picture to the site and returns its name there."""
        if EXTERNAL.match(target):
            raise ValueError(f"{folder.relative_to(self.root)}: the picture {target} lies elsewhere: keep a copy "
                             "in assets/")
        path = (folder / target).resolve()
        if not path.is_file():
            raise ValueError(f"{folder.relative_to(self.root)}: there is no picture {target!r}: mend the link")
        name = "-".join(path.relative_to(self.root).parts)
        shutil.copyfile(path, self.out / name)
        return name


def find_exercises(root: pathlib.Path) -> dict:
    """The exercises of the repository at `root` by name; none where it has no such folder."""
    if not (root / "exercises" / "catalogue.py").is_file():
        return {}
    from catalogue import load

    return load()


def document_page(repository: Repository, place: pathlib.Path) -> Page:
    """The page of a Markdown file that is no chapter."""
    folder, address = (repository.root / place).parent, repository.documents[place]
    document = Document((repository.root / place).read_text(encoding="utf-8"), repository, folder,
                        repository.exercise_address)
    label = "Start" if address == "index.html" else address.removesuffix(".html").capitalize().replace("_", " ")
    label = f"9: {label.lower()}" if place.parts[0].startswith("step9") else label
    group = "Reference" if place.name == "CONTRIBUTING.md" else ROOMS.get(place.parts[0], GROUPS[0])
    return Page(address, label, document.title, document.headings, "document.html", {"body": document.html}, group)


def tour_page(repository: Repository, place: pathlib.Path) -> Page:
    """The page of a tour. Raises ValueError for a scene that has lost its place."""
    tour = read_tour(repository.root / place)
    number = next((n for n, folder in repository.steps.items() if folder == tour.path.parent), None)
    before = predecessor(repository.steps, number) if number else None
    scenes = tour_content(tour, before, repository.diffs.get(number, []), repository)
    return Page(repository.tours[place], "", tour.title, [], "tour.html", {"scenes": scenes, "film": "",
                "name": repository.tours[place].removeprefix("tour-").removesuffix(".html")})


def step_page(repository: Repository, number: int) -> Page:
    """The page of a step: its chapter, whose words in backticks lead to what they name, and its diff."""
    folder, diffs, defined = repository.steps[number], repository.diffs[number], {}
    names = {diff.name: diff.added for diff in diffs}
    for diff in diffs:
        for what, lines in definitions("\n".join(diff.new)).items():
            for word in {what, what.rpartition(".")[2]}:  # a method by its own name, too
                defined.setdefault(word, []).append((diff.name, *lines))

    def find(text: str) -> tuple[str, int] | None:
        """(file, line) of what a text in backticks names, if the step's diff shows it.

        Of several places, the one that the step changed counts; None if it changed several, such as `forward`.
        """
        places = defined.get(re.sub(r"\(.*\)$", "", text), [])
        places = [place for place in places if not names[place[0]].isdisjoint(range(place[1], place[2] + 1))] or places
        return places[0][:2] if len(places) == 1 else None

    def name(text: str) -> str | None:
        place = find(text)
        address = f"#file-{text}" if text in names else f"#{place[0]}-{place[1]}" if place else None
        return address or repository.exercise_address(text)

    document = Document((folder / "README.md").read_text(encoding="utf-8"), repository, folder, name)
    files = [{"name": diff.name, "what": diff.change.what, "counts": diff.change.counts,
              "html": Drawing(diff).html()} for diff in diffs]
    before = predecessor(repository.steps, number)
    unchanged = sorted(path.name for path in folder.glob("*.py") if path.name not in names)
    headings = [*document.headings, Heading(2, "diff", "The diff"),
                *(Heading(3, f"file-{file['name']}", file["name"]) for file in files)]
    place = folder.relative_to(repository.root)
    content = {"body": document.html, "number": number, "files": files, "before": before and before.name,
               "unchanged": [(name, repository.source(place / name)) for name in unchanged]}
    content["exercises"] = [(repository.exercise_address(name), name) for name, one in repository.exercises.items()
                            if one.chapter == str(number)]
    content["tours"] = [address for tour, address in repository.tours.items() if tour.parent == place]
    group = ROOMS.get(place.parts[0], GROUPS[0])
    return Page(f"step{number}.html", str(number), document.title, headings, "step.html", content, group)


def source_page(repository: Repository, place: pathlib.Path) -> Page:
    """A file with line numbers, or the list of a folder's files with the first line of what each says about itself."""
    path = repository.root / place
    if path.is_dir():
        files = sorted(child for child in path.iterdir() if child.is_file() and child.suffix in (".py", ".sh", ".json"))
        says = [ast.get_docstring(ast.parse(child.read_text(encoding="utf-8"))) if child.suffix == ".py" else ""
                for child in files]
        rows = [(child.name, repository.address(child.name, path), (text or "").partition("\n")[0])
                for child, text in zip(files, says)]
        return Page(repository.sources[place], "", f"{place.as_posix()}/", [], "folder.html", {"rows": rows})
    lines = tokens_by_line(path.read_text(encoding="utf-8"), path.name)
    text = "".join(f'<code class="new"><a class="no" id="L{k}" href="#L{k}">{k}</a>{line_html(line)}</code>'
                   for k, line in enumerate(lines, start=1))
    return Page(repository.sources[place], "", place.as_posix(), [], "source.html", {"body": text})
