"""torchtitan, DeepSeek-V3 with an MTP layer, tp 2, no sequence parallelism: eh_proj's gradient is 2 times too large.

python same_numbers/found/torchtitan_mtp.py [MTP LAYERS] (exit code 0: the fault is there; 3: it is gone; 2: it can't be
tried). _torchtitan.py lets torchtitan run on a CPU."""
import os
import sys
import tempfile

import torch

import _torchtitan

try:
    _torchtitan.prepare()
    from torchtitan.models.deepseek_v3 import MTPLoss, model_registry
except ImportError as error:
    print(f"needs torchtitan 0.3 and torch 2.14: {error}")
    sys.exit(2)


def go(rank, ranks, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=str(29600 + os.getppid() % 300 + ranks))
    spec = model_registry("debugmodel", num_mtp_layers=int((sys.argv[1:] or [1])[0]))
    spec.model.layers = spec.model.layers[:2]
    trainer = _torchtitan.make(spec, folder, tensor_parallel_degree=ranks, enable_sequence_parallel=False,
                               loss=MTPLoss.Config(global_vocab_size=spec.model.vocab_size))
    _torchtitan.weights_by_name(trainer)
    losses, run = [], trainer.fwd_bwd_fn
    trainer.fwd_bwd_fn = lambda *args: losses.append(run(*args)) or losses[-1]
    _torchtitan.step(trainer, 1, _torchtitan.batches(0))
    torch.save((float(losses[0]), _torchtitan.gradients(trainer)), f"{folder}/{ranks}_{rank}")


if __name__ == "__main__":
    folder = tempfile.mkdtemp()
    [torch.multiprocessing.spawn(go, (ranks, folder), nprocs=ranks) for ranks in (1, 2)]
    (loss, one), (same, many) = (torch.load(f"{folder}/{ranks}_0") for ranks in (1, 2))
    off = {name: float((many[name] * each).sum() / (each * each).sum()) for name, each in one.items()
           if (many[name] - each).norm() > 1e-5 * each.norm()}
    print(f"loss {loss:.15g} and {same:.15g}; of {len(one)} gradients {len(off)} wrong, times too large:", off or "mended")
    sys.exit(0 if off else 3)
