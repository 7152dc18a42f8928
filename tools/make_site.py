"""Builds the walkthrough site: the chapters, each step's diff, timelines, and two pages to try things out.

    python tools/make_site.py [--out site/]     a folder that any browser reads, without a server or a network
    python tools/make_site.py --runs [1 2 ...]  runs the steps first, all or some, for their curves and timelines

It needs `pip install -e '.[docs]'`, and --runs what the steps need. What makes the pages lies in site/.
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
    parser.add_argument("--runs", type=int, nargs="*", metavar="STEP", help="run these steps first; none named: all")
    args = parser.parse_args()
    sys.path += [str(root / "tools" / room) for room in ("site", "maintain")]  # the latter for --runs
    try:
        from site_build import build
        from site_runs import TOPOLOGIES, read_runs, write_runs

        if args.runs is not None:
            if unknown := [step for step in args.runs if step not in TOPOLOGIES]:
                raise ValueError(f"--runs {unknown[0]}: there is no such step, choose from 1 to {max(TOPOLOGIES)}")
            write_runs(args.runs or list(TOPOLOGIES))
        started = time.perf_counter()
        pages = build(root, args.out, read_runs())
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
