"""torch: FSDP2's set_gradient_divide_factor(2) on a mesh of one rank divides by 4 in float64 and float16.

python same_numbers/found/divide_twice.py (exit code 0: the fault is there; 3: it is gone; 2: it can't be tried)"""
import sys

import torch
import torch.distributed as dist

try:
    from torch.distributed.fsdp import FSDPModule, fully_shard
    FSDPModule.set_gradient_divide_factor
except (ImportError, AttributeError) as error:
    print(f"needs torch 2.8: {error}")
    sys.exit(2)

if __name__ == "__main__":
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16):
        model, x = torch.nn.Linear(4, 4, bias=False).to(dtype), torch.ones(2, 4, dtype=dtype)
        model(x).sum().backward()
        before = model.weight.grad.clone()
        model.zero_grad()
        fully_shard(model).set_gradient_divide_factor(2.0)
        model(x).sum().backward()
        found[str(dtype)[6:]] = float((before / model.weight.grad.full_tensor()).mean())
    print(f"torch {torch.__version__}: divided by {found} instead of 2")
    is_there = len({*found.values()}) > 1
    print("" if is_there else f"mended in {torch.__version__}", end="")
    sys.exit(0 if is_there else 3)
