"""The seconds and the memory of each module of a model on this rank, as the stages of a pipeline run them.

A model's forward does more than its modules do: masks, rotary tables, residuals. So what is timed is a whole pipeline
stage that holds one module, made of the model on the meta device, where the other modules take no memory:

    first   the embedding       layer   one decoder layer of each kind       last   the final norm, the head, the loss
"""

import copy
import functools
import gc
import math
import socket
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn as nn

from model import cast_weights_once, cross_entropy
from pipeline_stage import PipelineStage
from pipeline_template import PipelineTemplate, listed_modules
from planning.measure import now
from planning.module_memory import load_code, memory_of
from ranks.memory import free_memory, memory_of_process
from ranks.progress import progress
from stage_weights import make_buffers
from utils import UserError

BLOCKS = 5
OPTIMIZER = 0.1  # of the time
TRAINING_BYTES = 40e6  # that a process on a CPU takes after measuring, besides its model: data, threads, communication
PASSES = ("forward", "backward")
FIRST, LAST = "first", "last"
UNKNOWN = {"saved_bytes": 0.0, "working_bytes": 0.0}  # the facts of a part until they are measured


def time_runs(make_run: Callable[[int], Callable], sizes: list[int], seconds: float) -> dict[int, list[float]]:
    """Size -> the seconds that make_run(size)() returns: their means over blocks of time, and of the blocks the median.

    A machine that is throttled is fast and slow by turns, which no single call shows. Sizes take turns, so that what
    else the machine does for a while changes few blocks of each. The first run of a size warms up, and counts only
    where no time is left. Sizes that would take too long are left out, but never the first.
    """
    deadline, first, runs = time.perf_counter() + seconds, {}, {}
    for size in sizes:
        expected = max((sum(numbers) * size / before for before, numbers in first.items()), default=0.0)
        if first and expected > (deadline - time.perf_counter()) / 2:
            break
        runs[size] = make_run(size)
        first[size] = runs[size]()
    blocks = {size: [] for size in first}
    turns = [size for _ in range(BLOCKS) for size in first]
    for turn, size in enumerate(turns):
        rows, start = [], time.perf_counter()
        end = start + (deadline - start) / (len(turns) - turn)
        while time.perf_counter() < end:
            rows.append(runs[size]())
        if rows:
            blocks[size].append([statistics.fmean(column) for column in zip(*rows)])
    return {size: [statistics.median(column) for column in zip(*(blocks[size] or [first[size]]))] for size in first}


class LayerProfiler:
    """Builds the stages of `whole`, a causal model on the meta device, one at a time, and times each. `lora`: its
    adapters, or None. `criterion(output, batch)`: the loss of a model of transformers.

    `facts`: what measure_memory() returned, on this rank or on another one. Those of modules are its numbers of
    parameters, and the bytes that it takes while it computes: `saved_bytes` that a sample leaves for its backward,
    `working_bytes` of a sample and `fixed_bytes` of any micro-batch that are needed for a moment besides.

    Raises Unsupported for a model that step 9 can't cut, or whose buffers are not computed with its initial weights.
    """

    facts: dict[str, dict[str, float]] | None = None
    optimizer_seconds = 0.0  # of a parameter

    def __init__(self, whole: nn.Module, seq_len: int, dtype: torch.dtype, device: torch.device, lora=None,
                 criterion: Callable | None = None):
        self.whole, self.lora, self.criterion, self.config = whole, lora, criterion, whole.config
        self.seq_len, self.dtype, self.device = seq_len, dtype, device
        self.is_ours = PipelineTemplate.get_model_name(whole) == "model.Llama"
        load_code(device)
        before, self.layers, behind = listed_modules(self.whole)
        self.names = ["+".join(before), *self.layers, "+".join(behind)]
        kinds = [self.kind_of(k) for k in range(len(self.layers))]
        self.like = [f"layer {kinds.index(kind)}" for kind in kinds]  # the part that each layer is timed as
        self.parts = {FIRST: before, **{f"layer {k}": [name] for k, name in enumerate(self.layers)
                                        if f"layer {k}" in self.like}, LAST: behind}  # the modules of its stage

    def kind_of(self, k: int) -> str:
        """Layers of one kind have the same modules, parameters of the same shapes, and one entry in layer_types."""
        layer, types = self.whole.get_submodule(self.layers[k]), getattr(self.config, "layer_types", None)
        shapes = [(name, tuple(param.shape)) for name, param in layer.named_parameters()]
        return repr(([type(module).__name__ for module in layer.modules()], shapes, types[k] if types else None))

    def build(self, part: str) -> tuple[nn.Module, Callable]:
        """The modules of a part, and the call that its stage makes: of token ids (B, T) or hidden states (B, T, D)."""
        whole, own = copy.deepcopy(self.whole), self.parts[part]
        names = PipelineTemplate.get_modules(whole)
        start = names.index(own[0])
        cuts = [names[:start], own, names[start + len(own) :]]
        template = PipelineTemplate(PipelineTemplate.get_model_name(whole), [cut for cut in cuts if cut])
        autocast = self.dtype if self.dtype == torch.bfloat16 and not self.is_ours else None
        stage = PipelineStage(whole.to(torch.promote_types(self.dtype, torch.float32)), template, int(start > 0),
                              autocast)
        self.materialise(stage, has_layers=part not in (FIRST, LAST))
        self.hidden_dtype = stage.dtype

        def call(x: torch.Tensor) -> torch.Tensor:
            if part == FIRST:
                return stage(None, input_ids=x)
            ids = torch.zeros(x.size(0), self.seq_len, dtype=torch.int64, device=self.device)
            out = stage(x, input_ids=ids)
            if part == LAST:
                return cross_entropy(out, ids) if self.is_ours else self.criterion(out, {"target_ids": ids})
            return out

        return stage.model, call

    def materialise(self, stage: PipelineStage, has_layers: bool) -> None:
        """Gives the stage random weights, and its adapters where it has layers."""
        if self.lora:
            self.lora.prepare(stage)
        made: dict[nn.Parameter, nn.Parameter] = {}  # what is tied stays tied
        for name, param in list(stage.model.named_parameters(remove_duplicate=False)):
            module, _, key = name.rpartition(".")
            if param not in made:
                value = torch.empty(param.shape, dtype=param.dtype, device=self.device).uniform_(-0.05, 0.05)
                made[param] = nn.Parameter(value, requires_grad=self.lora is None)
            setattr(stage.model.get_submodule(module), key, made[param])
        make_buffers(stage.model, self.device, dict(stage.model.named_buffers()))
        for buffer in stage.model.buffers():  # those that only files have
            if buffer.is_floating_point():
                buffer.nan_to_num_()
        if self.lora and has_layers:
            self.lora.apply(stage, self.device)
        stage.model.to(self.device)

    def modules_of(self, found: dict[str, dict]) -> list[dict]:
        """For each of `names` its costs, such as bytes and seconds, out of those of the parts."""
        return [found[part] for part in (FIRST, *self.like, LAST)]

    def modules(self) -> list[dict]:
        """Of cluster.json: for each module of the whole model its name, and its facts."""
        return [{"name": name, **facts} for name, facts in zip(self.names, self.modules_of(self.facts))]

    def seconds_of_modules(self, size: int, recompute: bool, seconds: float = 2.0) -> list[float]:
        """What each of `names` takes for a micro-batch, forward and backward, without having them all in memory."""
        found, last = self.measure([size], seconds), len(self.names) - 1
        (forward,), (backward,) = found["forward"].values(), found["backward"].values()
        return [f * (1 + (recompute and 0 < k < last)) + b for k, (f, b) in enumerate(zip(forward, backward))]

    def dtypes(self) -> dict[str, str]:
        """Of the activations, of what stages send each other, and of frozen weights where there are any."""
        found = {"dtype": self.dtype, "hidden_dtype": self.hidden_dtype,
                 **({"frozen_dtype": self.lora.dtype} if self.lora else {})}
        return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}

    def measure(self, sizes: list[int], seconds: float) -> dict:
        """Seconds of each module by micro-batch size, forward and backward, and of the optimizer; the memory that is
        free for a model in the end, when all libraries are loaded, and what else the process has then."""
        facts, room = self.facts or dict.fromkeys(self.parts, UNKNOWN), float(free_memory(self.device))
        timed = self.modules_of({part: self.of_stage(part, functools.partial(
            self.time_part, part, facts[part], sizes, seconds, room))
            for part in progress("measuring speed", self.parts, by_all=True)})
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        others = TRAINING_BYTES if self.device.type == "cpu" else 0.0
        return {"free_memory": max(0.0, free_memory(self.device) - others),
                "process_memory": memory_of_process() + others, "optimizer_seconds": self.optimizer_seconds,
                **{kind: {str(size): [times[kind, size] for times in timed] for size in sizes
                          if all((kind, size) in times for times in timed)} for kind in PASSES}}

    def measure_memory(self, room: float, seconds: float = math.inf) -> dict[str, dict[str, float]]:
        """The facts of each part. One rank finds them for all, so that the others need not have the memory for it."""
        def facts_of(part: str, module: nn.Module, call: Callable) -> dict[str, float]:
            trained = sum(param.numel() for param in module.parameters() if param.requires_grad)
            scales = [param.quant_state.absmax.nbytes // param.itemsize for param in module.parameters()
                      if hasattr(param, "quant_state")]  # of what is packed into 4 bits
            return {"parameters": trained,
                    "frozen_parameters": sum(param.numel() for param in module.parameters()) - trained + sum(scales),
                    **memory_of(module, functools.partial(self.passes, part, call), self.device, room, seconds)}

        return {part: self.of_stage(part, functools.partial(facts_of, part))
                for part in progress("measuring memory", self.parts)}

    def of_stage(self, part: str, measure: Callable):
        """What measure(module, call) returns of the stage of this part, which is in memory as long as that takes."""
        try:
            # As in training, all passes share what is cast: in our Llama, and in the outermost autocast.
            with cast_weights_once(), torch.autocast(self.device.type, enabled=False):
                return measure(*self.build(part))
        except torch.OutOfMemoryError:
            raise UserError(f"rank {dist.get_rank()} on {socket.gethostname()} has not the memory to time the part "
                            f"{part!r} with a sample of {self.seq_len} tokens: take a shorter --seq_len, or measure "
                            "without this machine") from None
        finally:
            gc.collect()  # a stage and its hooks refer to each other

    def time_part(self, part: str, facts: dict[str, float], sizes: list[int], seconds: float, room: float,
                  module: nn.Module, call: Callable) -> dict[tuple[str, int], float]:
        """Seconds by pass and micro-batch size, of those that there is memory for. Of a layer also the optimizer's."""
        a_sample = facts["saved_bytes"] + facts["working_bytes"]
        fitting = [size for size in sizes if size * a_sample < room / 2] or sizes[:1]
        share = {FIRST: 0.15, LAST: 0.25}.get(part, 0.5 / (len(self.parts) - 2))
        timed = time_runs(functools.partial(self.passes, part, call), fitting, seconds * share)
        if part.startswith("layer") and (trained := [param for param in module.parameters() if param.requires_grad]):
            self.optimizer_seconds = time_optimizer(trained, seconds * OPTIMIZER, self.device)
        return {(kind, size): value for size, both in timed.items() for kind, value in zip(PASSES, both)}

    def passes(self, part: str, call: Callable, size: int) -> Callable:
        """What runs a micro-batch forward and backward, and returns the seconds of each."""
        if part == FIRST:
            x = torch.randint(self.config.vocab_size, (size, self.seq_len), device=self.device)
        else:
            shape = (size, self.seq_len, self.config.hidden_size)
            x = torch.randn(shape, dtype=self.hidden_dtype, device=self.device).requires_grad_()
        gradient = None if part == LAST else torch.randn_like(call(x))

        def run() -> tuple[float, float]:
            x.grad = None
            start = now(self.device)
            out = call(x)
            middle = now(self.device)
            if out.requires_grad:  # not where an embedding is frozen
                torch.autograd.backward(out, gradient)
            return middle - start, now(self.device) - middle

        return run


def time_optimizer(params: list[nn.Parameter], seconds: float, device: torch.device) -> float:
    """AdamW's seconds a parameter."""
    optimizer = torch.optim.AdamW(params, lr=0.0, fused=True)
    optimizer.step()  # makes the moments

    def run() -> tuple[float]:
        start = now(device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return (now(device) - start,)

    return time_runs(lambda _: run, [1], seconds)[1][0] / sum(param.numel() for param in params)
