"""Builds the walkthrough site: the chapters, each step's diff, and a page to try out schedules.

    python tools/make_site.py [--out site/]     a folder that any browser reads, without a server or a network

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
    args = parser.parse_args()
    sys.path.append(str(root / "tools" / "site"))
    try:
        from site_build import build

        started = time.perf_counter()
        pages = build(root, args.out)
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
