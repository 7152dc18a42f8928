"""transformers, tp_plan="auto": HRM-Text's weights are not those of the checkpoint once they are read over two ranks.

python same_numbers/found/tp_loading.py (exit code 0: the fault is there; 3: it is gone; 2: it can't be tried)"""
import os
import sys
import tempfile

import torch
import torch.distributed as dist

try:
    import transformers.distributed.tensor_parallel
    from transformers import HrmTextConfig, HrmTextForCausalLM
except ImportError as error:
    sys.exit(print(f"needs transformers with HRM-Text: {error}") or 2)


def go(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    HrmTextForCausalLM(HrmTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8)).save_pretrained(f"{folder}/model")
    dist.barrier()  # rank 0 has saved it
    one, many = (HrmTextForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float64, **plan)
                 for plan in ({}, {"tp_plan": "auto"}))
    ids = torch.arange(24).view(2, 12) + 3
    losses = [float(model(input_ids=ids, labels=ids).loss.detach()) for model in (one, many)]
    whole = [getattr(p, "full_tensor", lambda: p)() for p in many.parameters()]
    off = {name: round(float((w - p).norm() / p.norm()), 2) for (name, p), w in zip(one.named_parameters(), whole)}
    torch.save((losses, {name: each for name, each in off.items() if each > 0}, len(off)), f"{folder}/off")


if __name__ == "__main__":
    torch.multiprocessing.spawn(go, (folder := tempfile.mkdtemp(),), nprocs=2)
    losses, wrong, count = torch.load(f"{folder}/off")
    print(f"loss {losses[0]:.6f}, over two ranks {losses[1]:.6f}; {len(wrong)} of {count} weights are off:", wrong)
    sys.exit(0 if wrong else print("mended in transformers", transformers.__version__) or 3)
