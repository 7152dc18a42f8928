"""The walkthrough site: every page is whole and leads somewhere; with -m slow, what a real browser finds in it."""

import html.parser
import itertools
import json
import os
import re
import shutil
import subprocess

import pytest
from launch import ROOT, STEPS

for library in ("jinja2", "markdown_it", "pygments"):
    pytest.importorskip(library, reason="the site needs pip install -e '.[docs]'")

from site_build import build
from site_tours import find_programs
from steps_compare import predecessor
from tours import find_tours, read_tour


class Reader(html.parser.HTMLParser):
    """What a page refers to and what it is made of."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.loaded, self.headings, self.alts, self.lang = [], [], [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.links += [found["href"]] if tag == "a" else []
        self.loaded += [found[name] for name in ("src", "href") if name in found and tag != "a"]
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.alts += [found.get("alt")] if tag == "img" else []
        self.lang = found.get("lang") if tag == "html" else self.lang


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site") / "out"
    build(ROOT, folder)
    return folder


@pytest.fixture(scope="module")
def pages(site):
    return {path.name: Reader(path.read_text(encoding="utf-8")) for path in site.glob("*.html")}


def test_every_link_leads_somewhere(site, pages):
    steps = [f"step{number}.html" for number in STEPS]
    assert {"index.html", "cluster.html", "playground.html", "choose.html", *steps} <= pages.keys()
    for name, page in pages.items():
        assert len(page.ids) == len(set(page.ids)), name
        for link in page.links:
            path, mark, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                continue
            assert not path or (site / path).is_file(), (name, link)
            assert not mark or anchor in pages[path or name].ids, (name, link)


def test_pages_are_in_four_groups(site):
    text = (site / "step12.html").read_text(encoding="utf-8").partition("</header>")[0]
    groups = re.findall(r"<summary( class=\"here\")?>(.+?)</summary><ul>(.*?)</ul>", text, re.S)
    links = {title: re.findall('href="(.+?)"', part) for _, title, part in groups}
    assert [*links] == ["Course", "Beyond", "Your machines", "Reference"] and [bool(here) for here, *_ in groups] == [
        False, True, False, False]
    assert links["Course"][:2] == ["index.html", "step1.html"] and {"step16.html", "choose.html"} <= {*links["Beyond"]}
    assert "cluster.html" in links["Your machines"] and {"torch.html", "contributing.html"} <= {*links["Reference"]}
    assert all(5 <= len(each) <= 14 for each in links.values()), links


def test_nothing_is_loaded_from_elsewhere(site, pages):
    assert all(address == "data:," or (site / address).is_file() for page in pages.values() for address in page.loaded)
    for path in [*site.glob("*.css"), *site.glob("*.js")]:
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|@import|url\(|\bfetch\(|\bimport\(", text), path.name


def test_pages_can_be_read_by_everybody(pages):
    for name, page in pages.items():
        assert page.lang == "en" and all(page.alts), name
        assert page.headings.count(1) == 1 and page.headings[0] == 1, (name, page.headings)
        assert all(b <= a + 1 for a, b in itertools.pairwise(page.headings)), (name, page.headings)


@pytest.mark.parametrize("step", STEPS)
def test_a_page_shows_both_files_whole(site, step):
    """Without the marks, the lines on the left of a step's page are the old file, those on the right the new one."""
    before = predecessor({int(number): folder for number, folder in STEPS.items()}, int(step))
    text, shown = (site / f"step{step}.html").read_text(encoding="utf-8"), set()
    for name, part in re.findall(r'<h3 id="file-([^"]+)">(.*?)(?=<h3 id="file-|</section>)', text, re.S):
        is_new = '<div class="code one"' in part
        for side, folder in (("new", STEPS[step]), *([] if is_new else [("old", before)])):
            cells = re.findall(rf'<code class="{side}"><(?:a|span) class="no"[^>]*>\d+</(?:a|span)>(.*?)</code>', part,
                               re.S)
            lines = [html.unescape(re.sub(r"<[^>]+>", "", cell)) for cell in cells]
            path = folder / name
            assert lines == (path.read_text(encoding="utf-8").splitlines() if path.exists() else []), (name, side)
        shown.add(name)
    unchanged = {path.name for path in STEPS[step].glob("*.py")} - shown
    assert shown and all((before / name).read_bytes() == (STEPS[step] / name).read_bytes() for name in unchanged)


@pytest.fixture
def repository(tmp_path):
    """repository(readme): a repository of one step with this README.md."""
    def repository(readme: str):
        (tmp_path / "repository" / "step1_model").mkdir(parents=True)
        for name, text in {"step1_model/model.py": "x = 1\n", "step1_model/README.md": "# Step 1\n",
                           "README.md": f"# Title\n\n{readme}\n", "picture.png": ""}.items():
            (tmp_path / "repository" / name).write_text(text)
        return tmp_path / "repository"

    return repository


def test_site_replaces_nothing_but_a_site(repository, tmp_path):
    root, out = repository("[model](step1_model/model.py)"), tmp_path / "out"
    assert build(root, out) == build(root, out)
    with pytest.raises(ValueError, match="something else than a site"):
        build(root, root)
    assert (root / "README.md").exists()


@pytest.fixture(scope="module")
def film(tmp_path_factory):
    """A site with the film of step 4. Where CI=1 says that all is installed, a program that is missing is red."""
    folder = tmp_path_factory.mktemp("films")
    try:
        build(ROOT, folder, ["4"])
    except ValueError as error:
        assert "needs" in str(error) and not os.environ.get("CI"), error
        pytest.skip(str(error))
    return folder


@pytest.fixture(scope="module")
def browsed(film, tmp_path_factory):
    """What site_browser.mjs finds in a real browser."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert chromium or not os.environ.get("CI"), "CI has to have a browser"
    if not chromium or not shutil.which("npm"):
        pytest.skip("there is no chromium, or no npm: apt-get install chromium npm")
    folder = tmp_path_factory.mktemp("browser")
    install = subprocess.run(["npm", "install", "--no-save", "--prefix", folder, "playwright-core", "axe-core"],
                             capture_output=True, text=True, timeout=300, env={**os.environ, "HOME": str(folder)})
    if install.returncode:
        pytest.skip(f"npm can't install playwright-core and axe-core: {install.stderr.strip()[-300:]}")
    command = ["node", ROOT / "tests" / "support" / "site_browser.mjs", folder, chromium, film, folder / "profile"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_no_page_has_an_error_or_a_barrier_or_is_wider_than_a_phone(browsed):
    assert browsed["errors"] == browsed["requests"] == browsed["overflow"] == []
    assert browsed["axe"] == [], json.dumps(browsed["axe"], indent=1)


@pytest.mark.slow
def test_forms_are_followed(browsed):
    found = browsed["playground"]
    assert found["start"]["facts"] == ["33", "27.3 %", "4", "48"] and found["start"]["live"] == list("4321")
    assert found["zb"]["facts"][:3] == ["27", "11.1 %", "4"] and found["zb"]["live"] == list("4444")
    assert found["changed"]["facts"] == ["25", "28.0 %", "2", "16"]  # stage 0 computes for 8 x 3 and waits once, for 1
    assert found["reloaded"] == found["changed"]
    assert "from 1 to 16" in found["wrong"]["problem"]
    found = browsed["choose"]
    assert found["changed"]["facts"][:2] == ["70.6 billion", "374"] and found["reloaded"] == found["changed"]
    assert found["changed"]["best"][:9] == ["1", "1", "4", "16", "1", "1f1b", "1", "512", "8.49"]
    assert "divides the hidden size" in found["wrong"]["problem"]


@pytest.mark.slow
def test_a_tour_plays_in_a_browser(browsed):
    found = browsed["tour"]
    number = {name: [int(scene.removeprefix("scene-")) for scene in steps["shown"]]
              for name, steps in found.items() if name != "captions"}
    assert number["start"] == [1] and number["right"] == [3] and number["left"] == [2]
    assert number["addressed"] == number["phone"] == [5] and found["phone"]["width"] <= 390
    assert 6 <= number["played"][0] <= 8 and found["played"]["hash"] == f"#scene-{number['played'][0]}"
    assert all(steps["isLitInView"] in (True, None) for name, steps in found.items() if name != "captions")
    assert found["addressed"]["isLitInView"]
    assert found["captions"]["mode"] == "showing" and found["captions"]["count"] > 20, "from a file, without a server"


@pytest.mark.slow
def test_a_film_is_as_long_as_its_words(film):
    tour = read_tour(find_tours(ROOT)["4"])
    probed = json.loads(subprocess.run(
        ["ffprobe", "-v", "error", "-show_streams", "-show_format", "-of", "json", film / "step4.mp4"],
        capture_output=True, text=True, check=True).stdout)
    [stream], seconds = probed["streams"], sum(scene.seconds for scene in tour.scenes)
    assert (stream["codec_name"], stream["width"], stream["height"]) == ("h264", 1920, 1080)
    assert float(probed["format"]["duration"]) == pytest.approx(seconds, abs=2)
    assert seconds <= 7 * 60 and int(probed["format"]["size"]) <= 6e6


def test_films_without_the_programs_are_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--films needs Chromium and ffmpeg: apt-get install"):
        find_programs()
