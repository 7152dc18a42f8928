"""How many tokens a second do three equal stages write, for one prompt and for several at once? On the three hosts of
the test bed, each with so many percent of a core; needs root and models/smollm2-135m-instruct (tools/get_smollm2.py).

    tools/testbed.sh up
    python tools/maintain/speed_of_talk.py --prompts 1 8 --percent 50

With one prompt one stage works at a time. With several, all three do: at most three times the tokens. The head counts
as layers, so the last stage has fewer of them.
"""

import tools_path  # noqa: F401  before launch

import argparse
import os
import pathlib
import re
import subprocess
import sys
import tempfile

from launch import ROOT, Help
from bed import NODES, SSH_CONFIG, testbed
from launcher import write_hosts

MODEL = "models/smollm2-135m-instruct"


def rate(folder: pathlib.Path, prompts: int, layers: str, tokens: int) -> float:
    """Tokens a second, of all prompts together."""
    hosts = write_hosts(folder, *(f"{node} python={sys.executable}" for node in NODES))
    words = ["cluster/generate.py", "--checkpoint", MODEL, "--dtype", "float32", "--pipelines", layers,
             "--max_new_tokens", str(tokens)]
    words += [word for number in range(prompts) for word in ("--prompt", f"A list of {number + 2} rivers:")]
    environment = {**os.environ, "SSH_OPTIONS": f"-F {SSH_CONFIG}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([ROOT / "cluster" / "launch_cluster.sh", hosts, "--", *words], cwd=ROOT, env=environment,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = re.search(r"in [\d.]+ s, ([\d.]+) tokens/s", done.stdout)
    return float(found[1]) if found else sys.exit(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 8], help="so many at once, one after the other")
    parser.add_argument("--percent", type=int, default=50, help="of a core that each host has")
    parser.add_argument("--layers", default="12,12,6", help="of the three stages")
    parser.add_argument("--tokens", type=int, default=40, help="behind each prompt")
    args = parser.parse_args()
    testbed("slow", "all", args.percent)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rates = [rate(pathlib.Path(folder), prompts, args.layers, args.tokens) for prompts in args.prompts]
    finally:
        testbed("slow", "all", "off")
    for prompts, each in zip(args.prompts, rates):
        print(f"{prompts:3} prompts at once: {each:6.1f} tokens/s, {each / rates[0]:.2f} times")


if __name__ == "__main__":
    main()
