"""How much memory a real rank allocates in its second optimizer step. `allocated.py OUT train.py FLAGS...`

Rank r writes OUT/rank<r>.json: by how many bytes the memory of all tensors grew at most, from the end of zero_grad() to
the end of the optimizer's step, as torch's own allocator reports it.
"""

import json
import os
import runpy
import sys

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

STEPS = 2


def run(out: str, script: str) -> None:
    profiler, calls = profile(activities=[ProfilerActivity.CPU], profile_memory=True), []
    zero_grad = torch.nn.Module.zero_grad

    def start(module, *args, **kwargs) -> None:
        zero_grad(module, *args, **kwargs)
        calls.append("zero_grad")
        if len(calls) == STEPS:
            profiler.start()

    def stop(optimizer, *_) -> None:
        if len(calls) == STEPS:
            calls.append("stopped")
            profiler.stop()
            grown = most = 0
            events = [each for each in profiler.profiler.kineto_results.events() if each.name() == "[memory]"]
            for event in sorted(events, key=lambda each: each.start_ns()):
                grown += event.nbytes()
                most = max(most, grown)
            os.makedirs(out, exist_ok=True)
            with open(os.path.join(out, f"rank{os.environ['RANK']}.json"), "w") as file:
                json.dump(most, file)

    torch.nn.Module.zero_grad = start
    register_optimizer_step_post_hook(stop)
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    run(sys.argv.pop(0), sys.argv[0])
