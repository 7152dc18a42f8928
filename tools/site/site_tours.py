"""The tours as pages and as silent films: a scene is a section with its lines of code beside its words.

Of a film, Chromium draws the scenes, ffmpeg cuts and joins them: each stays as long as it takes to read its words.
step4.mp4 stands beside tour-4.html, which shows it. tools/course/tours.py says what a scene is.
"""

import html
import pathlib
import re
import shutil
import subprocess
import tempfile

import jinja2
from markupsafe import Markup
from pygments.formatters import HtmlFormatter
from site_code import scene_html

from course.steps_compare import predecessor
from course.tours import Tour, file_stem, read_tour

HERE = pathlib.Path(__file__).resolve().parent
WIDTH, HEIGHT, FRAMES_PER_SECOND = 1920, 1080, 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SCENE = """

## {number}. {title}

<span id="scene-{number}"></span>

<div class="scene"><div class="shown">{code}</div><div class="told">

{words}

</div></div>"""
FILM = """

<details><summary>As a film, without sound</summary><video src="{film}" controls preload="metadata"
aria-label="{title}"></video></details>"""


def draw_scenes(repository, place: pathlib.Path) -> tuple[Tour, list[str]]:
    """A tour, and the code of each of its scenes as HTML. Raises ValueError for a scene that has lost its place."""
    tour = read_tour(repository.root / place)
    number = next((n for n, folder in repository.steps.items() if folder == tour.path.parent), None)
    before = predecessor(repository.steps, number) if number else None
    changes = repository.changes.get(number, {})
    return tour, [scene_html(scene, tour.path.parent, before, changes) for scene in tour.scenes]


def tour_text(repository, place: pathlib.Path, film: str) -> str:
    """The page of a tour. `film`: the name of its film, if there is one."""
    tour, codes = draw_scenes(repository, place)
    text = f"# {tour.title}" + (FILM.format(film=film, title=html.escape(tour.title)) if film else "")
    for number, (scene, code) in enumerate(zip(tour.scenes, codes), 1):
        words = scene.words + f"\n\n```bash\n{scene.command}\n```" * bool(scene.command)
        words += f"\n\nLook for `{scene.expected}`." * bool(scene.expected)
        text += SCENE.format(number=number, title=scene.title, code=code.replace("\n", " "),
                             words=repository.rewrite(words, tour.path.parent))
    return text


def find_programs() -> tuple[str, str]:
    """Chromium and ffmpeg. Raises ValueError where one is missing."""
    browser, ffmpeg = next(filter(None, map(shutil.which, BROWSERS)), None), shutil.which("ffmpeg")
    if not browser or not ffmpeg:
        missing = " and ".join(["Chromium"] * (not browser) + ["ffmpeg"] * (not ffmpeg))
        raise ValueError(f"--films needs {missing}: apt-get install chromium ffmpeg, or build the site without films")
    return browser, ffmpeg


def run(*command) -> None:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise ValueError(f"{pathlib.Path(command[0]).name} failed: {done.stderr.strip()[-500:]}")


def make_film(repository, place: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Draws the scenes of a tour below each other, HEIGHT pixels each, and joins them to a film in `out`."""
    browser, ffmpeg = find_programs()
    tour, codes = draw_scenes(repository, place)
    seconds, film = [scene.seconds for scene in tour.scenes], out / f"{file_stem(repository.tours[place])}.mp4"
    template = jinja2.Template((HERE / "film.html").read_text(encoding="utf-8"), autoescape=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        page, picture = folder / "film.html", folder / "film.png"
        style = Markup((HERE / "site.css").read_text(encoding="utf-8") + HtmlFormatter().get_style_defs(".highlight"))
        words = [re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", scene.words) for scene in tour.scenes]
        page.write_text(template.render(tour=tour, codes=codes, words=words, style=style), encoding="utf-8")
        run(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-device-scale-factor=1", f"--user-data-dir={folder / 'profile'}",
            f"--window-size={WIDTH},{HEIGHT * len(codes)}", f"--screenshot={picture}", page.as_uri())
        run(ffmpeg, "-y", "-i", picture, "-vf", f"untile=1x{len(codes)}", folder / "%02d.png")
        parts = [f"file {folder / f'{k:02}.png'}\nduration {each:.1f}" for k, each in enumerate(seconds, 1)]
        (folder / "list").write_text("\n".join([*parts, parts[-1].splitlines()[0]]) + "\n")
        run(ffmpeg, "-y", "-f", "concat", "-safe", "0", "-i", folder / "list", "-r", FRAMES_PER_SECOND,
            "-t", sum(seconds), "-c:v", "libx264", "-tune", "stillimage", "-pix_fmt", "yuv420p",
            "-movflags", "+faststart", film)
    print(f"{film.name}: {sum(seconds) / 60:.1f} minutes, {film.stat().st_size / 1e6:.1f} MB", flush=True)
    return film
