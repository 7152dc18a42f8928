"""torchtitan, gpt_oss, tp 2 without expert parallelism: the experts' output bias is added by each rank, so twice.

python same_numbers/found/torchtitan_gpt_oss.py (exit code 0: the fault is there; 3: it is gone; 2: it can't be tried)
_torchtitan.py lets torchtitan run on a CPU."""
import os
import sys
import tempfile

import torch

import _torchtitan

try:
    _torchtitan.prepare()
    from torchtitan.models.gpt_oss import model_registry
except ImportError as error:
    print(f"needs torchtitan 0.3 and torch 2.14: {error}")
    sys.exit(2)


def go(rank, ranks, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(29600 + os.getppid() % 300 + ranks))
    spec = model_registry("debugmodel", attn_backend="flex")
    spec.model.layers = spec.model.layers[:2]
    trainer = _torchtitan.make(spec, folder, tensor_parallel_degree=ranks, enable_sequence_parallel=False)
    _torchtitan.weights_by_name(trainer)
    losses, run = [], trainer.fwd_bwd_fn
    trainer.fwd_bwd_fn = lambda *args: losses.append(run(*args)) or losses[-1]
    _torchtitan.step(trainer, 1, _torchtitan.batches(0))
    torch.save((float(losses[0]), _torchtitan.gradients(trainer)), f"{folder}/{ranks}_{rank}")


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    [torch.multiprocessing.spawn(go, (ranks, folder), nprocs=ranks) for ranks in (1, 2)]
    (loss, one), (other, many) = (torch.load(f"{folder}/{ranks}_0") for ranks in (1, 2))
    off = {name: float((many[name] - each).norm() / each.norm()) for name, each in one.items()}
    wrong = {name: each for name, each in off.items() if each > 1e-5}
    print(f"loss {loss:.15g} and {other:.15g}; {len(wrong)} of {len(one)} gradients are off, by up to {max(off.values()):.2g}", "" if wrong else "mended")
    sys.exit(0 if wrong else 3)
