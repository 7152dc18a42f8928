"""Builds the walkthrough site: the chapters, each step's diff, timelines, and two pages to try things out.

    python tools/site.py [--out site/]        a folder that any browser reads, without a server or a network
    python tools/site.py --runs [1 2 ...]     runs the steps first, all of them or some, for their curves and timelines

It needs `pip install -e '.[docs]'`, and --runs what the steps need. The standard library has a module of this name,
too: whoever imports `site` and finds this file gets that one.
"""

import argparse
import importlib.util
import pathlib
import sys
import sysconfig
import time


def main() -> int:
    """Builds the site; returns the exit code, 2 where something has to be mended or installed first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=pathlib.Path, default=root / "site", help="the folder to write (default: site/)")
    parser.add_argument("--runs", type=int, nargs="*", metavar="STEP", help="run these steps first; none named: all")
    args = parser.parse_args()
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
        print(f"site.py: {error}: pip install -e '.[docs]'", file=sys.stderr)
        return 2
    except (ValueError, AssertionError) as error:
        print(f"site.py: {error}", file=sys.stderr)
        return 2
    size = sum(path.stat().st_size for path in args.out.iterdir())
    print(f"{args.out}: {len(pages)} pages, {size / 1e6:.1f} MB, {time.perf_counter() - started:.1f} s")
    return 0


def become_standard_module() -> None:
    """Puts the standard library's `site` in this module's place."""
    spec = importlib.util.spec_from_file_location("site", pathlib.Path(sysconfig.get_path("stdlib"), "site.py"))
    sys.modules["site"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["site"])


if __name__ == "__main__":
    sys.exit(main())
elif __name__ == "site":
    become_standard_module()
