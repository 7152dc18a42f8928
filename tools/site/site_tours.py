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

from site_code import line_html, tokens_by_line
from site_diff import Drawing, FileDiff
from site_markdown import Document
from tours import Scene, Tour, shown_lines

NUMBER = re.compile(r'<a class="no"[^>]*>(\d+)</a>')  # of a line, with an address of its own
WIDTH, HEIGHT, FRAMES_PER_SECOND = 1920, 1080, 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def scene_code(scene: Scene, before: pathlib.Path | None, diffs: list[FileDiff]) -> str:
    """The scene's lines as HTML: `.lit` are those that it speaks of, `.added` those that the step changed."""
    if scene.place is None:
        shown = [diff for diff in diffs if scene.diff in ("", diff.name) and diff.change.what != "removed"]
        rows = [f'<p class="file"><b>{diff.name}</b> {diff.change.what} {diff.change.counts}</p>'
                + f'<div class="code {"one" if diff.change.what == "new" else "two"}">{Drawing(diff).html()}</div>'
                * (diff.change.what == "changed" or scene.diff == diff.name) for diff in shown]
        return NUMBER.sub(r'<span class="no">\1</span>', "".join(rows))  # a line may stand in several scenes
    path, rows = scene.place.path, []
    lines = tokens_by_line(path.read_text(encoding="utf-8"), path.name)
    for number, is_lit, is_added, _ in shown_lines(scene.place, before):
        kind = "lit " * is_lit + "added" * is_added
        rows.append(f'<code class="{kind}"><span class="no">{number}</span>{line_html(lines[number - 1])}</code>')
    return (f'<p class="file"><b>{path.parent.name}/{path.name}</b></p>'
            f'<div class="code one">{"".join(rows)}</div>')


def tour_content(tour: Tour, before: pathlib.Path | None, diffs: list[FileDiff], repository) -> list[dict]:
    """What the template tour.html and the films show, a dictionary a scene."""
    return [{"title": scene.title, "seconds": round(scene.seconds, 1), "command": scene.command,
             "file": scene.place.path.name if scene.place else scene.diff or "the diff", "plain": scene.words,
             "expected": html.escape(scene.expected), "words": Document(scene.words, repository, tour.path.parent).html,
             "code": scene_code(scene, before, diffs)} for scene in tour.scenes]


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


def captions(scenes: list[dict]) -> str:
    """WebVTT: each sentence of a scene for as long as it takes to read, the last one until the scene ends.

    As an address of its own: a page that is opened from a file may not load another file's track.
    """
    def clock(seconds: float) -> str:
        return f"{int(seconds) // 60:02}:{seconds % 60:06.3f}"

    lines, start = ["WEBVTT\n"], 0.0
    for scene in scenes:
        end, now = start + scene["seconds"], start
        sentences = re.split(r"(?<=[.:?!])\s+", re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", scene["plain"]))
        for k, sentence in enumerate(sentences):
            until = end if k == len(sentences) - 1 else now + len(sentence.split()) * 60 / 160
            lines.append(f"{clock(now)} --> {clock(until)}\n{sentence}\n")
            now = until
        start = end
    return "data:text/vtt;base64," + base64.b64encode("\n".join(lines).encode()).decode()


def make_film(film: pathlib.Path, scenes: list[dict], text: str) -> pathlib.Path:
    """Draws and joins one film. `text`: a page with all scenes below each other, HEIGHT pixels each."""
    browser, ffmpeg = find_programs()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        shutil.copyfile(film.parent / "site.css", folder / "site.css")
        page, picture = folder / "film.html", folder / "film.png"
        page.write_text(text, encoding="utf-8")
        run(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--force-device-scale-factor=1", f"--user-data-dir={folder / 'profile'}",
            f"--window-size={WIDTH},{HEIGHT * len(scenes)}",
            f"--screenshot={picture}", page.as_uri())
        run(ffmpeg, "-y", "-i", picture, "-vf", f"untile=1x{len(scenes)}", folder / "%02d.png")
        parts = [f"file {folder / f'{k:02}.png'}\nduration {scene['seconds']}" for k, scene in enumerate(scenes, 1)]
        (folder / "list").write_text("\n".join([*parts, parts[-1].splitlines()[0]]) + "\n")
        run(ffmpeg, "-y", "-f", "concat", "-safe", "0", "-i", folder / "list", "-r", FRAMES_PER_SECOND,
            "-t", sum(scene["seconds"] for scene in scenes), "-c:v", "libx264", "-tune", "stillimage",
            "-pix_fmt", "yuv420p", "-movflags", "+faststart", film)
    return film
