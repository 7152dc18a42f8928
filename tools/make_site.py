"""Builds the walkthrough site: the chapters, each step's diff, and a page to try out schedules.

    python tools/make_site.py [--out site/]     a folder that any browser reads, without a server or a network
    python tools/make_site.py --films [4 9 ...] draws the tours as films, all or some: with Chromium and ffmpeg

It needs `pip install -e '.[docs]'`. What makes the pages lies in site/.
"""

import argparse
import pathlib
import sys
import time


def main() -> int:
    """Builds the site; returns the exit code, 2 where something has to be mended or installed first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=pathlib.Path, default=root / "site", help="the folder to write (default: site/)")
    parser.add_argument("--films", nargs="*", metavar="TOUR", help="draw these tours as films, too; none named: all")
    args = parser.parse_args()
    sys.path += [str(root / "tools" / "site"), str(root / "exercises")]
    try:
        from site_build import build
        from site_tours import find_programs
        from tours import find_tours

        tours = find_tours(root)
        if unknown := [name for name in args.films or () if name not in tours]:
            raise ValueError(f"--films {unknown[0]}: there is no such tour, choose among {', '.join(tours)}")
        if args.films is not None:
            find_programs()
        started = time.perf_counter()
        pages = build(root, args.out, args.films or tours if args.films is not None else ())
    except ModuleNotFoundError as error:
        print(f"make_site.py: {error}: pip install -e '.[docs]'", file=sys.stderr)
        return 2
    except (ValueError, AssertionError) as error:
        print(f"make_site.py: {error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: {len(pages)} pages, {size / 1e6:.1f} MB, {time.perf_counter() - started:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
