"""The walkthrough site: every page is whole and leads somewhere; what a real browser finds in it."""

import html.parser
import json
import os
import re
import shutil
import subprocess

import pytest
from lab.launch import ROOT, STEPS

for library in ("sphinx", "myst_parser", "furo", "latex2mathml"):
    pytest.importorskip(library, reason="the site needs pip install -e '.[docs]'")

from course.steps_compare import predecessor
from course.tours import find_tours, read_tour
from make_site import build
from site_links import Repository
from site_tours import find_programs, make_film

SEARCHES = {  # what people type -> the page that has to be among the first three
    "hang": "debugging", "NCCL timeout": "debugging", "Watchdog caught collective operation timeout": "debugging",
    "OOM": "profiling", "loss spike": "step3", "gradient accumulation": "step3", "all_reduce": "step2",
    "GLOO_SOCKET_IFNAME": "launch", "LoRA": "fine_tuning", "zero": "step12", "fine-tune on three machines": "fine_tuning",
    "flags of step 8": "flags", "exercise 5": "step5", "ColumnParallelLinear": "step4", "one_f_one_b": "exercise-one_f_one_b",
    "Received data size doesn't match": "debugging", "address already in use": "index", "diverged": "index",
    "apply_tensor_parallel": "step4", "mixture of experts": "step16",
    # several words that no page has together, and what else a thing is called
    "learning rate warmup": "step3", "vocabulary split cross entropy": "step4", "wandb offline": "comparing_runs",
    "W&B": "comparing_runs", "weights and biases login": "comparing_runs", "save the model and resume": "checkpoints",
    "load checkpoint on another grid": "checkpoints", "CUDA OOM in backward": "profiling", "ring attention zigzag": "step15",
    "how to split llama 70b": "choose", "resume": "checkpoints", "save": "checkpoints"}
KINDS = ("index", "step4", "tour-4", "playground", "choose", "exercise-f", "source-tools-sizes-splits.py", "fine_tuning",
         "08_1f1b", "museum")


class Reader(html.parser.HTMLParser):
    """What a page refers to and what it is made of."""

    def __init__(self, text: str):
        super().__init__()
        self.ids, self.links, self.loaded, self.headings, self.alts, self.lang = set(), [], [], [], [], None
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids |= {found["id"]} if "id" in found else set()
        self.links += [found["href"]] if tag == "a" and "href" in found else []
        self.loaded += [found[name] for name in ("src", "href") if name in found and tag != "a"]
        self.headings += [tag] if tag == "h1" else []
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


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site, pages):
    assert {"index.html", "cluster.html", "tour-9b.html", *(f"step{number}.html" for number in STEPS)} <= pages.keys()
    for name, page in pages.items():
        for link in page.links:
            path, _, anchor = link.partition("#")
            if not re.match(r"[a-z]+:", link) and (path or anchor):
                assert not path or (site / path).is_file(), (name, link)
                assert not anchor or anchor in pages[path or name].ids, (name, link)
        for address in page.loaded:
            assert address[0] == "#" or (site / address.split("?")[0]).is_file(), (name, address)


def test_words_of_the_search_lead_to_places_that_are_there(pages):
    for line in (ROOT / "tools/site/words.txt").read_text().splitlines():
        page, _, anchor = line.partition(": ")[0].partition("#")
        assert not anchor or anchor in pages[f"{page}.html"].ids, line
        assert f"{page}.html" in pages, line


def test_pages_can_be_read_by_everybody(pages):
    for name, page in pages.items():
        assert page.lang == "en" and all(page.alts) and (name == "search.html" or page.headings == ["h1"]), name


def test_navigation_is_grouped_and_has_the_titles_of_the_pages(site):
    text = (site / "step12.html").read_text(encoding="utf-8").partition('<div class="sidebar-tree">')[2]
    text = text.partition("</aside>")[0]
    groups = dict(re.findall(r'<span class="caption-text">(.+?)</span></p>(.*?)(?=<p class="caption"|\Z)', text, re.S))
    assert [*groups] == ["Course", "Laboratory", "Beyond", "Your machines", "Is your trainer right", "Reference"]
    titles = re.findall(r'toctree-l1[^>]*><a class="reference internal" href="step(\d+)\.html">(.+?)</a>',
                        groups["Course"])
    assert [(number, (STEPS[number] / "README.md").read_text().partition("\n")[0][2:]) for number, _ in titles] == titles
    assert "12 ZeRO 1 and 2" in groups["Beyond"] and "Debugging: it hangs" in groups["Is your trainer right"]


@pytest.mark.parametrize("step", STEPS)
def test_a_page_shows_both_files_whole(site, step):
    """The red and the plain lines of a diff are the old file, its green and plain lines the new one."""
    before = predecessor({int(number): folder for number, folder in STEPS.items()}, int(step))
    text, shown = (site / f"step{step}.html").read_text(encoding="utf-8"), set()
    for name, part in re.findall(r'aria-label="([\w.]+\.py)">(.*?)</div>', text, re.S):
        lines = [(kind, html.unescape(re.sub(r"<[^>]+>", "", line))) for kind, line in re.findall(
            r'<code class="(old|new|)"><(?:a|span) class="ln"[^>]*>\d+</(?:a|span)>(.*?)</code>', part, re.S)]
        for folder, kinds in ((STEPS[step], ("new", "")), (before, ("old", ""))):
            if folder and (folder / name).exists():
                found = [line.rstrip() for kind, line in lines if kind in kinds]
                assert found == [line.rstrip() for line in (folder / name).read_text().splitlines()], (name, kinds)
        shown.add(name)
    unchanged = {path.name for path in STEPS[step].glob("*.py")} - shown
    assert shown and all((before / name).read_bytes() == (STEPS[step] / name).read_bytes() for name in unchanged)


def test_formulas_are_formulas(site):
    texts = {name: (site / f"step{name}.html").read_text(encoding="utf-8") for name in (1, 3, 4, 10)}
    assert all(text.count("<math") > 4 and not re.search(r"\\(frac|sum|sqrt)", text) for text in texts.values())


@pytest.fixture
def repository(tmp_path):
    """repository(readme, **more): a repository of one step with this README.md, and more files."""
    def repository(readme: str, more=()):
        for name, text in {"step1_model/model.py": "x = 1\n", "step1_model/README.md": "# Step 1\n", **dict(more),
                           "README.md": f"# Title\n\n{readme}\n", "picture.png": ""}.items():
            (tmp_path / "repository" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "repository" / name).write_text(text)
        return tmp_path / "repository"

    return repository


@pytest.mark.parametrize("readme, more, said", [
    ("[a](step2/model.py)", {}, "the link to 'step2/model.py' leads to nothing"),
    ("![a](other.png)", {}, "there is no picture 'other.png'"),
    ("[a](step1_model/README.md#none)", {}, "Sphinx refuses"),
    ("", {"docs/NEW.md": "# New\n"}, "docs/NEW.md is in no group of the navigation")])
def test_what_is_broken_is_named(repository, tmp_path, capfd, readme, more, said):
    with pytest.raises(ValueError, match=said):
        build(repository(readme, more), tmp_path / "out")
    assert ("index.md:3" in capfd.readouterr().err) == ("Sphinx" in said)


def test_site_replaces_nothing_but_a_site(repository, tmp_path):
    root, out = repository("[model](step1_model/model.py#L1)"), tmp_path / "out"
    assert build(root, out) == build(root, out)
    with pytest.raises(ValueError, match="something else than a site"):
        build(root, root)
    assert (root / "README.md").exists()


@pytest.fixture(scope="module")
def browsed(site, tmp_path_factory):
    """What site_browser.mjs finds in a real browser. Where CI=1 says that all is installed, a missing one is red."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert chromium or not os.environ.get("CI"), "CI has to have a browser"
    if not chromium or not shutil.which("npm"):
        pytest.skip("there is no chromium, or no npm: apt-get install chromium npm")
    folder = tmp_path_factory.mktemp("browser")
    install = subprocess.run(["npm", "install", "--no-save", "--prefix", folder, "playwright-core", "axe-core"],
                             capture_output=True, text=True, timeout=300, env={**os.environ, "HOME": str(folder)})
    if install.returncode:
        pytest.skip(f"npm can't install playwright-core and axe-core: {install.stderr.strip()[-300:]}")
    wanted = json.dumps({"pages": [f"{kind}.html" for kind in KINDS], "queries": [*SEARCHES]})
    done = subprocess.run(["node", ROOT / "tests" / "support" / "site_browser.mjs", folder, chromium, site, wanted],
                          capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_no_kind_of_page_has_an_error_or_a_barrier_or_is_wider_than_a_phone(browsed):
    assert browsed["errors"] == browsed["requests"] == browsed["overflow"] == browsed["axe"] == []
    assert browsed["before"] < 0 <= browsed["after"] and browsed["arrived"] == "step12.html"  # on a phone, two clicks


@pytest.mark.slow
@pytest.mark.parametrize("query", SEARCHES)
def test_a_search_finds_the_page(browsed, query):
    first = [address.split(".html")[0] for address in browsed["results"][query]]
    assert SEARCHES[query] in first, browsed["results"][query]


@pytest.mark.slow
def test_forms_are_followed(browsed):
    found = browsed["playground"]
    assert found["start"] == {"facts": ["33", "27.3 %", "4", "48"], "live": list("4321"), "bars": 64}
    assert found["zb"]["facts"][:3] == ["27", "11.1 %", "4"] and found["zb"]["live"] == list("4444")
    assert found["changed"]["facts"] == ["25", "28.0 %", "2", "16"]  # stage 0 computes for 8 x 3 and waits once, for 1
    assert found["reloaded"] == found["changed"] and "from 1 to 16" in found["wrong"]
    found = browsed["choose"]
    assert found["changed"]["facts"][:2] == ["70.6 billion", "302"] and found["reloaded"] == found["changed"]
    assert found["changed"]["best"][:9] == ["1", "2 s", "2", "16", "1", "zb", "1", "512", "8.97"]
    assert "divides the hidden size" in found["wrong"]


@pytest.mark.slow
def test_a_film_is_as_long_as_its_words(tmp_path):
    place = find_tours(ROOT)["17"]
    try:
        film = make_film(Repository(ROOT, tmp_path), place.relative_to(ROOT), tmp_path)
    except ValueError as error:
        assert "needs" in str(error) and not os.environ.get("CI"), error
        pytest.skip(str(error))
    probed = json.loads(subprocess.run(["ffprobe", "-v", "error", "-show_streams", "-show_format", "-of", "json", film],
                                       capture_output=True, text=True, check=True).stdout)
    [stream], seconds = probed["streams"], sum(scene.seconds for scene in read_tour(place).scenes)
    assert (stream["codec_name"], stream["width"], stream["height"]) == ("h264", 1920, 1080)
    assert float(probed["format"]["duration"]) == pytest.approx(seconds, abs=2)
    assert seconds <= 7 * 60 and int(probed["format"]["size"]) <= 6e6


def test_films_without_the_programs_are_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="--films needs Chromium and ffmpeg: apt-get install"):
        find_programs()
