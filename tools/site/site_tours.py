"""The tours as pages and as silent films: a scene is a section with its lines of code beside its words.

tour.js plays a page's scenes one at a time. Without JavaScript, and in print, all of them stand below each other. Of a
film, Chromium draws the scenes, ffmpeg cuts and joins them. step4.mp4 stands beside tour-4.html, which shows it; its
captions are the words of the scenes, at reading speed. tools/tours.py says what a scene is.
"""

import base64
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
from steps_compare import predecessor
from tours import Scene, Tour, file_stem, read_tour

HERE = pathlib.Path(__file__).resolve().parent
WIDTH, HEIGHT, FRAMES_PER_SECOND = 1920, 1080, 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
PAGE = """# {title}

{film}<p>{count} scenes. <span id="keys" hidden>← and → turn to the scene before and the next one; the space bar plays them
at reading speed. <button id="play" type="button">Play</button></span></p>

<div id="tour">

{scenes}

</div><script src="_static/tour.js"></script>
"""
SCENE = """<section class="scene" id="scene-{number}" data-seconds="{seconds:.1f}"><div class="shown">{code}</div>\
<div class="told"><h2>{number}. {title}</h2>

{words}

</div></section>"""
FILM = """<details><summary>As a film, without sound</summary><video src="{film}" controls preload="metadata" \
aria-label="{title}"><track default kind="captions" srclang="en" label="English" src="{captions}"></video></details>

"""


def draw_scenes(repository, place: pathlib.Path) -> tuple[Tour, list[str]]:
    """A tour, and the code of each of its scenes as HTML. Raises ValueError for a scene that has lost its place."""
    tour = read_tour(repository.root / place)
    number = next((n for n, folder in repository.steps.items() if folder == tour.path.parent), None)
    before = predecessor(repository.steps, number) if number else None
    return tour, [scene_html(scene, tour.path.parent, before, repository.changes.get(number, {})) for scene in tour.scenes]


def tour_text(repository, place: pathlib.Path, film: str) -> str:
    """The page of a tour. `film`: the name of its film, if there is one."""
    tour, codes = draw_scenes(repository, place)
    shown = FILM.format(film=film, title=html.escape(tour.title), captions=captions(tour.scenes)) if film else ""
    scenes = []
    for number, (scene, code) in enumerate(zip(tour.scenes, codes), 1):
        words = scene.words + f"\n\n```bash\n{scene.command}\n```" * bool(scene.command)
        words += f"\n\nLook for `{scene.expected}`." * bool(scene.expected)
        scenes.append(SCENE.format(number=number, title=html.escape(scene.title), seconds=scene.seconds,
                                   code=code.replace("\n", " "), words=repository.rewrite(words, tour.path.parent)))
    return PAGE.format(title=tour.title, film=shown, count=len(scenes), scenes="\n\n".join(scenes))


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


def captions(scenes: list[Scene]) -> str:
    """WebVTT: each sentence of a scene for as long as it takes to read, the last one until the scene ends.

    As an address of its own: a page that is opened from a file may not load another file's track.
    """
    def clock(seconds: float) -> str:
        return f"{int(seconds) // 60:02}:{seconds % 60:06.3f}"

    lines, start = ["WEBVTT\n"], 0.0
    for scene in scenes:
        end, now = start + scene.seconds, start
        sentences = re.split(r"(?<=[.:?!])\s+", re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", scene.words))
        for k, sentence in enumerate(sentences):
            until = end if k == len(sentences) - 1 else now + len(sentence.split()) * 60 / 160
            lines.append(f"{clock(now)} --> {clock(until)}\n{sentence}\n")
            now = until
        start = end
    return "data:text/vtt;base64," + base64.b64encode("\n".join(lines).encode()).decode()


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
        page.write_text(template.render(tour=tour, codes=codes, style=style), encoding="utf-8")
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
