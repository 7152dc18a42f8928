"""Ranks that plan by themselves. `auto_plan_ranks.py MODEL BYTES,BYTES,... FLAGS of train_distributed.py`

The machines have so many bytes free. Each rank that the plan uses prints what it got as one line of JSON.
"""

import json
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent.parent / "cluster"))

from ranks import course  # noqa: E402, F401  before step 9's modules

import process_group_manager as pgm  # noqa: E402
import train_distributed  # noqa: E402
from planning import profiler  # noqa: E402
from models import causal  # noqa: E402
from planning.plan_file import machines_of  # noqa: E402
from ranks.placement import renumber_ranks  # noqa: E402
from run import decide  # noqa: E402
from utils import one_clear_error  # noqa: E402

model, memory = sys.argv[1], [float(word) for word in sys.argv[2].split(",")]
sys.argv[1:] = ["--model_name", model, *sys.argv[3:]]


def main() -> None:
    args = train_distributed.parse_args()
    pgm.init_process_group("gloo")
    before, device = dist.get_rank(), torch.device("cpu")
    decide.free_memory = profiler.free_memory = lambda device: memory[before]
    decide.MEASURE_SECONDS, profiler.TRAINING_BYTES = 0.5, 0.0
    dtype = getattr(torch, args.dtype)
    if plan := decide.find_plan(args, causal.make_model(args, dtype), device, dtype):
        renumber_ranks(machines_of(plan))
    total = torch.tensor([before + 1.0])
    dist.all_reduce(total)  # of the ranks that are left
    print(json.dumps({"plan": plan, "before": before, "rank": dist.get_rank(), "sum": total.item()}), flush=True)
    dist.barrier()


with one_clear_error():
    main()
