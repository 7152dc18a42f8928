"""Writes the site: all pages, their pictures, and what a browser needs besides, into a folder of its own."""

import itertools
import json
import pathlib
import shutil
import sys

import jinja2
from launch import ROOT, modules_of
from markupsafe import Markup
from site_exercises import exercise_pages
from site_pages import GROUPS, Page, Repository, document_page, source_page, step_page, tour_page
from site_tours import captions, make_film
from tours import file_stem

TEMPLATES = pathlib.Path(__file__).resolve().parent
MARKER = ".site"  # a folder that holds it was written by build(), and may be replaced
sys.path.append(str(ROOT / "cluster"))
with modules_of(9):
    from data_sheets import PRESETS
    from planning.schedules import SCHEDULES as OF_PLANNER
with modules_of(11):
    from virtual_stages import SCHEDULES as OF_STEPS
FORMS = [Page("playground.html", "Schedules", "Schedule playground", [], "playground.html", {}),
         Page("choose.html", "How to split", "How to split", [], "choose.html", {"models": PRESETS}, "Beyond")]


def empty_folder(out: pathlib.Path) -> None:
    """An empty folder for the site. Raises ValueError rather than replace what build() has not written."""
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise ValueError(f"{out} holds something else than a site: choose another folder with --out, or empty it")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARKER).touch()


def build(root: pathlib.Path, out: pathlib.Path, films=()) -> list[str]:
    """Builds the site of the repository at `root` in the folder `out`; returns its pages' addresses.

    `films`: the tours to draw as films, as find_tours() names them.
    Raises ValueError for a link or a picture that leads to nothing.
    """
    out, root = out.resolve(), root.resolve()
    empty_folder(out)
    repository = Repository(root, out)
    steps = [step_page(repository, number) for number in repository.steps]
    others = [document_page(repository, place) for place, address in repository.documents.items()
              if not address.startswith("step") and place not in repository.tours]
    tours = [tour_page(repository, place) for place in repository.tours]
    pages = [others[0], *steps, *FORMS, *others[1:]]
    sources, done = exercise_pages(repository), set()
    while len(done) < len(repository.sources):  # the page of a folder links to further files
        for place in [place for place in repository.sources if place not in done]:
            sources.append(source_page(repository, place))
            done.add(place)
    sources = [add_film(page, page.content["name"], out) if page.content["name"] in films else page
               for page in tours] + sources
    write(out, pages, sources)
    return [page.address for page in pages + sources]


def templates() -> jinja2.Environment:
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True,
                                     undefined=jinja2.StrictUndefined, lstrip_blocks=True)
    environment.filters["raw"] = Markup
    return environment


def add_film(page: Page, name: str, out: pathlib.Path) -> Page:
    """Draws the film of a tour's page, which then shows it."""
    shutil.copyfile(TEMPLATES / "site.css", out / "site.css")
    scenes = page.content["scenes"]
    text = templates().get_template("film.html").render(title=page.title, scenes=scenes)
    film = make_film(out / f"{file_stem(name)}.mp4", scenes, text)
    minutes = sum(scene["seconds"] for scene in scenes) / 60
    print(f"{film.name}: {minutes:.1f} minutes, {film.stat().st_size / 1e6:.1f} MB", flush=True)
    return page._replace(content=page.content | {"film": film.name, "captions": captions(scenes)})


def write(out: pathlib.Path, pages: list[Page], sources: list[Page]) -> None:
    """`pages` follow each other, with links to the next and the previous one; `sources` stand alone."""
    environment = templates()
    for k, page in enumerate(pages + sources):
        is_in_order = k < len(pages)
        previous = pages[k - 1] if is_in_order and k > 0 else None
        following = pages[k + 1] if is_in_order and k + 1 < len(pages) else None
        text = environment.get_template(page.template).render(
            page=page, pages=pages, groups=GROUPS, previous=previous, following=following, **page.content)
        (out / page.address).write_text(text, encoding="utf-8")
    for path in TEMPLATES.iterdir():
        if path.suffix in (".css", ".js"):
            shutil.copyfile(path, out / path.name)
    (out / "schedules.js").write_text(f"const SCHEDULES = {json.dumps(schedules())};\n")


def schedules() -> dict[str, dict]:
    """name -> stages -> micro-batches -> what each stage does, as "F0 F1 B0": all that the playground's form can ask
    for. A stroke stands behind what is of the second chunk."""
    found = {}
    for (name, schedule), p, m in itertools.product((OF_PLANNER | OF_STEPS).items(), range(1, 9), range(1, 17)):
        chunks = [2] if name.startswith("interleaved") else []
        stages = [" ".join("{}{}{}".format(*action[:2], "'" * (*action, 0)[2]) for action in schedule(s, p, m, *chunks))
                  for s in range(p)]
        found.setdefault(name, {}).setdefault(p, {})[m] = stages
    return found
