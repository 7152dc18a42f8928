"""torchtitan, gpt_oss, tp 2 without expert parallelism: the experts' output bias is added by each rank, so twice.

python same_numbers/found/torchtitan_gpt_oss.py (exit code 0: the fault is there; 3: it is gone; 2: it can't be tried)
_torchtitan.py lets torchtitan run on a CPU."""
import sys

import _torchtitan

try:
    _torchtitan.prepare()
    from torchtitan.models.gpt_oss import model_registry
except ImportError as error:
    print(f"needs torchtitan 0.3 and torch 2.14: {error}")
    sys.exit(2)


def go(rank, ranks, folder):
    _torchtitan.one_step(rank, ranks, folder, model_registry("debugmodel", attn_backend="flex"))


if __name__ == "__main__":
    loss, other, pairs = _torchtitan.compared(go)
    off = [float((many - one).norm() / one.norm()) for name, one, many in pairs]
    wrong = sum(each > 1e-5 for each in off)
    print(f"loss {loss:.15g} and {other:.15g}; {wrong} of {len(off)} gradients are off, by up to {max(off):.2g}")
    print("" if wrong else f"mended in {_torchtitan.version()}")
    sys.exit(0 if wrong else 3)
