"""transformers, tp_plan="auto": from the second micro-batch on, gradients of Qwen 3's q_norm and k_norm are wrong.
python same_numbers/found/tp_accumulation.py (exit code 0: the fault is there; 3: it is gone; 2: it can't be tried)"""
import os
import sys
import tempfile

import torch
import torch.distributed as dist

try:
    import transformers.distributed.tensor_parallel
except ImportError as error:
    sys.exit(print(f"needs transformers with transformers.distributed: {error}") or 2)
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8)


def go(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).save_pretrained(f"{folder}/model")
    dist.barrier()  # rank 0 has saved it
    one, many = (transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float64, **more)
                 for more in ({}, {"tp_plan": "auto"}))
    ids = torch.randint(64, (3, 12), generator=torch.Generator().manual_seed(1))
    for n in (1, 2, 3):  # micro-batches
        for model in (one, many):
            model.zero_grad()
            [(model(input_ids=each, labels=each).loss / n).backward() for each in ids[:n].split(1)]
        whole = [getattr(p.grad, "full_tensor", lambda: p.grad)() for p in many.parameters()]
        off = {name: float((g - p.grad).norm() / p.grad.norm()) for (name, p), g in zip(one.named_parameters(), whole)}
        torch.save({name: round(each, 2) for name, each in off.items() if each > 1e-6}, f"{folder}/off{n}")


if __name__ == "__main__":
    torch.multiprocessing.spawn(go, (folder := tempfile.mkdtemp(),), nprocs=2)
    wrong = [torch.load(f"{folder}/off{n}") for n in (1, 2, 3)]
    print("off by so much of their length, of 1, 2 and 3 micro-batches:", *wrong)
    sys.exit(0 if any(wrong) else print("mended in transformers", transformers.__version__) or 3)
