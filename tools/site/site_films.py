"""The tours as silent films with captions: Chromium draws the scenes, ffmpeg cuts and joins them.

step4.mp4 stands beside tour4.html, which shows it. Its captions are the words of the scenes, at reading speed.
"""

import base64
import pathlib
import re
import shutil
import subprocess
import tempfile

WIDTH, HEIGHT, FRAMES_PER_SECOND = 1920, 1080, 5
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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
    """WebVTT: each sentence of a scene for as long as it takes to read, the last one until the scene ends."""
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
    return "\n".join(lines)


def captions_address(scenes: list[dict]) -> str:
    """The captions as an address of their own: a page that is opened from a file may not load another file's track."""
    return "data:text/vtt;base64," + base64.b64encode(captions(scenes).encode()).decode()


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
