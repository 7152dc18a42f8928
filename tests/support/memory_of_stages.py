"""Peak memory of each stage, predicted and measured. `memory_of_stages.py FLAGS of train_distributed.py`

The flags have --pipelines of one pipeline. What each module takes is measured before the training, as where machines
plan by themselves. Rank 0 prints a line of JSON for each stage: bytes that the process had then, bytes predicted for
its part of the model, and the largest resident set of the process from then on.
"""

import json
import os
import pathlib
import sys

import torch.distributed as dist

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent.parent / "cluster"))

from ranks import course  # noqa: E402, F401  before step 9's modules

from ranks.collectives import gather
from ranks.memory import return_freed_memory  # noqa: E402
import run.train  # noqa: E402
import train_distributed  # noqa: E402
from planning.profiler import LayerProfiler  # noqa: E402
from planning.machines import Cluster, Pipeline, Setting  # noqa: E402
from planning.measure import measure_with  # noqa: E402
from planning.simulate import peak_memory  # noqa: E402

found: dict[str, float] = {}


def predict(args, made, device, dtype) -> None:
    """In the place of find_plan."""
    return_freed_memory()
    profiler = LayerProfiler(made.model, args.seq_len, dtype, device, made.lora, made.criterion)
    cluster = Cluster({**measure_with(profiler, "model", (1,), 1.0), "flags": {}})
    layers, rank = tuple(args.pipelines[0][0]), dist.get_rank()
    pipeline = Pipeline(tuple(range(len(layers))), layers, args.num_microbatches[0][0])
    peaks = peak_memory(cluster, pipeline, args.batch_size, Setting(recompute=args.recompute))
    found.update(process=cluster.machines[rank].process_memory, model=peaks[rank])
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the largest resident set counts from here


def report(group=None) -> None:
    """In the place of destroy_process_group, at the end; what is of a `group` alone goes on."""
    if group is not None:
        return destroy(group)
    with open("/proc/self/status") as file:
        found["measured"] = next(1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM"))
    for stage, line in enumerate(gather(found)):
        if dist.get_rank() == 0:
            print(json.dumps({"stage": stage, **line}), flush=True)
    os._exit(0)


destroy = dist.destroy_process_group
run.train.find_plan = predict
dist.destroy_process_group = report
train_distributed.main()
