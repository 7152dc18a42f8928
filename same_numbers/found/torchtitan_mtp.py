"""torchtitan, DeepSeek-V3 with an MTP layer, tp 2, no sequence parallelism: eh_proj's gradient is 2 times too large.

python same_numbers/found/torchtitan_mtp.py [MTP LAYERS] (exit code 0: the fault is there; 3: it is gone; 2: it can't be
tried). _torchtitan.py lets torchtitan run on a CPU."""
import sys

import _torchtitan

try:
    _torchtitan.prepare()
    from torchtitan.models.deepseek_v3 import MTPLoss, model_registry
except ImportError as error:
    print(f"needs torchtitan 0.3 and torch 2.14: {error}")
    sys.exit(2)


def go(rank, ranks, folder):
    spec = model_registry("debugmodel", num_mtp_layers=int((sys.argv[1:] or [1])[0]))
    _torchtitan.one_step(rank, ranks, folder, spec, loss=MTPLoss.Config(global_vocab_size=spec.model.vocab_size))


if __name__ == "__main__":
    loss, other, pairs = _torchtitan.compared(go)
    off = {name: (f"{float((many * one).sum() / (one * one).sum()):.6f} times as large, "
                  f"off by {float((many - one).norm() / one.norm()):.2g}")
           for name, one, many in pairs if (many - one).norm() > 1e-5 * one.norm()}
    print(f"loss {loss:.15g} and {other:.15g}; {len(off)} of {len(pairs)} gradients are wrong:", off)
    print("" if off else f"mended in {_torchtitan.version()}")
    sys.exit(0 if off else 3)
