"""Builds the walkthrough site: the chapters, each step's diff, and a page to try out schedules.

    python tools/make_site.py [--out site/]     a folder that any browser reads, without a server or a network
    python tools/make_site.py --films [4 9 ...] draws the tours as films, all or some: with Chromium and ffmpeg

It needs `pip install -e '.[docs]'`. What makes the pages lies in site/; Sphinx puts them together.
"""

import argparse
import os
import pathlib
import shutil
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[1:1] = [str(ROOT), str(ROOT / "tools" / "site"), str(ROOT / "exercises")]

from lab.launch import writing

MARKER = ".site"  # a folder that holds it was written by build(), and may be replaced


def build(root: pathlib.Path, out: pathlib.Path, films=()) -> int:
    """Builds the site of the repository at `root` in the folder `out`; returns how many pages it has.

    `films`: the tours to draw as films, as find_tours() names them. Raises ValueError for a link or a picture that
    leads to nothing, and rather than replace what it has not written.
    """
    from site_forms import write_forms
    from site_links import Repository
    from site_pages import write_pages
    from site_tours import make_film
    from sphinx.cmd.build import build_main

    out, root = out.resolve(), root.resolve()
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise ValueError(f"{out} holds something else than a site: choose another folder with --out, or empty it")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    (out / MARKER).touch()
    with tempfile.TemporaryDirectory() as scratch:
        staged = pathlib.Path(scratch) / "pages"
        staged.mkdir()
        repository = Repository(root, staged)
        drawn = {name: make_film(repository, place, out).name
                 for place, name in repository.tours.items() if name in films}
        pages = write_pages(repository, drawn, write_forms())
        options = ["-q", "-W", "--keep-going", "-j", str(os.cpu_count()), "-c", str(ROOT / "tools" / "site")]
        options += ["-D", f"html_search_scorer={staged}/scorer.js", "-d", f"{scratch}/doctrees"]
        if build_main([*options, "-b", "html", str(staged), str(out)]):
            raise ValueError("Sphinx refuses what it names above: mend it")
    return pages


def main() -> int:
    """Builds the site; returns the exit code, 2 where something has to be mended or installed first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "site", help="the folder to write (default: site/)")
    parser.add_argument("--films", nargs="*", metavar="TOUR", help="draw these tours as films, too; none named: all")
    args = parser.parse_args()
    try:
        from site_tours import find_programs

        from course.tours import find_tours

        tours = find_tours(ROOT)
        if unknown := [name for name in args.films or () if name not in tours]:
            raise ValueError(f"--films {unknown[0]}: there is no such tour, choose among {', '.join(tours)}")
        if args.films is not None:
            find_programs()
        started = time.perf_counter()
        with writing(args.out):
            pages = build(ROOT, args.out, args.films or tours if args.films is not None else ())
    except ModuleNotFoundError as error:
        print(f"make_site.py: {error}: pip install -e '.[docs]'", file=sys.stderr)
        return 2
    except (ValueError, AssertionError) as error:
        print(f"make_site.py: {error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file())
    print(f"{args.out}: {pages} pages, {size / 1e6:.1f} MB, {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
