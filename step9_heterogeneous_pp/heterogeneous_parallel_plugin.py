"""Pipelines of unlike shapes that train one model together: everything that a training script needs, in four calls.

    plugin = HeterogeneousParallelPlugin(microbatch_size=2)
    plugin.set_pipelines([two_stages, one_stage], num_microbatches={two_stages: 6, one_stage: 2})
    dataloader = plugin.prepare_dataloader(dataset)
    model, optimizer, dataloader = plugin.configure(model, optimizer, dataloader)

    batches = iter(dataloader)
    for step in range(dataloader.steps_per_epoch):
        loss = plugin.execute_pipeline(batches, model, criterion, optimizer)
        optimizer.step()

Two machines of unlike speed can be two pipelines of one stage with unlike numbers of micro-batches; three small ones
can be one pipeline of three stages. Ranks are counted pipeline after pipeline, stage after stage, tp innermost.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from data_parallel import DataParallelBucket, find_owners
from heterogeneous_dataloader import HeterogeneousDataLoader
from hf_tensor_parallel import apply_tensor_parallel
from pipeline_parallel import connect_neighbours, one_f_one_b, run_schedule
from pipeline_stage import PipelineStage
from pipeline_template import PipelineTemplate
from stage_weights import load_weights
from utils import choose_device
from wire import parse_wire_dtype

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class StageManager:
    """Where in its pipeline this rank is."""

    def is_first_stage(self) -> bool:
        return pgm.process_group_manager.pp_is_first_stage

    def is_last_stage(self) -> bool:
        return pgm.process_group_manager.pp_is_last_stage


class HeterogeneousParallelPlugin:
    """`microbatch_size` samples pass a pipeline at once; `tp_size` ranks share each stage.

    `precision`: of the computation, also of a model that says otherwise; "bf16" keeps parameters and optimizer state in
    float32. `device`: as --device of train.py. `schedule`: of pipeline_parallel. `wire_dtype`: "float32", "bfloat16" or
    "int8", what hidden states and their gradients travel in between stages; `gradient_wire_dtype`: what the parameters'
    gradients travel in between those who hold them; None: as they are. Joins the process group, if nobody has yet.
    Raises ValueError for another precision or dtype, and for what choose_device and init_process_group find.
    """

    def __init__(self, tp_size: int = 1, microbatch_size: int = 1, precision: str = "fp32", device: str = "auto",
                 schedule: Callable = one_f_one_b, wire_dtype: str | None = None,
                 gradient_wire_dtype: str | None = None):
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r} is none of {', '.join(PRECISIONS)}")
        self.tp_size, self.microbatch_size, self.schedule = tp_size, microbatch_size, schedule
        self.wire_dtype = parse_wire_dtype("wire_dtype", wire_dtype)
        self.gradient_wire_dtype = parse_wire_dtype("gradient_wire_dtype", gradient_wire_dtype)
        self.compute_dtype = PRECISIONS[precision]
        self.master_dtype = torch.promote_types(self.compute_dtype, torch.float32)
        self.pipelines: list[PipelineTemplate] = []
        self.device, _, backend = choose_device(device, str(self.compute_dtype).removeprefix("torch."))
        if not dist.is_initialized():
            pgm.init_process_group(backend)
        self.stage_manager = StageManager()

    def set_pipelines(self, pipelines: list[PipelineTemplate],
                      num_microbatches: Mapping[PipelineTemplate, int] | list[int]) -> None:
        """Which pipelines there are, and how many micro-batches of a step each takes: by template, or one a pipeline.

        Raises AssertionError where the ranks do not match or a number is missing, ValueError for unlike models, and for
        what is no number.
        """
        if not isinstance(num_microbatches, (Mapping, list, tuple)):
            raise ValueError(f"num_microbatches={num_microbatches!r}: write a dictionary with a number for each "
                             "template, or a list with one for each pipeline")
        missing = "All pipelines must have a corresponding number of microbatches"
        if isinstance(num_microbatches, Mapping):
            without = [template for template in pipelines if template not in num_microbatches]
            assert not without, (f"{missing}: {len(num_microbatches)} numbers for {len(pipelines)} pipelines, none for "
                                 f"{', '.join(map(repr, without))}")
            num_microbatches = [num_microbatches[template] for template in pipelines]
        if not all(type(count) is int for count in num_microbatches):
            raise ValueError(f"num_microbatches={num_microbatches}: each has to be a whole number, an int")
        assert len(num_microbatches) == len(pipelines), (
            f"{missing}: {len(num_microbatches)} numbers {num_microbatches} for {len(pipelines)} pipelines")
        if min(num_microbatches, default=0) < 1:
            raise ValueError(f"num_microbatches={num_microbatches}: each pipeline, of at least one, needs at least one")
        if len(models := {template.model_name for template in pipelines}) > 1:
            raise ValueError(f"the pipelines are templates for several models: {', '.join(sorted(models))}")
        if self.wire_dtype and all(template.num_stages == 1 for template in pipelines):
            raise ValueError(f"wire_dtype={self.wire_dtype}, but no pipeline has a second stage to send anything to: "
                             "leave it out (what travels between pipelines is in gradient_wire_dtype)")
        self.pipelines, self.num_microbatches = list(pipelines), list(num_microbatches)
        pgm.setup_process_group_manager([template.num_stages for template in pipelines], self.tp_size)
        self.template = pipelines[pgm.process_group_manager.dp_rank]

    def require_pipelines(self, call: str) -> None:
        if not self.pipelines:
            raise ValueError(f"{call} comes after set_pipelines, which has not been called: call it before, with "
                             "the pipelines and their num_microbatches")

    @property
    def dp_size(self) -> int:
        return len(self.pipelines)

    @property
    def pp_size(self) -> int:
        """Stages of this rank's pipeline."""
        return self.template.num_stages

    @property
    def own_num_microbatches(self) -> int:
        return self.num_microbatches[pgm.process_group_manager.dp_rank]

    @property
    def weight(self) -> float:
        """This pipeline's share of the global batch."""
        return self.own_num_microbatches / sum(self.num_microbatches)

    @property
    def global_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.microbatch_size * sum(self.num_microbatches)

    @property
    def train_batch_size(self) -> int:
        """Those of them that pass this pipeline."""
        return self.microbatch_size * self.own_num_microbatches

    def prepare_dataloader(self, dataset, shuffle: bool = False, seed: int = 0, collate_fn: Callable | None = None,
                           num_workers: int = 0) -> HeterogeneousDataLoader:
        """This pipeline's share of the data set, whose items collate_fn makes into a dictionary of model inputs."""
        self.require_pipelines("prepare_dataloader")
        return HeterogeneousDataLoader(dataset, self.microbatch_size, self.num_microbatches,
                                       pgm.process_group_manager.dp_rank, self.device, self.master_dtype, shuffle, seed,
                                       collate_fn, num_workers)

    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer | Callable, dataloader=None, weights=None,
                  new_modules: tuple[str, ...] = (), seed: int = 0):
        """Keeps this rank's part of the model: (model, optimizer for its parameters, dataloader).

        `weights`: a state dict, a directory with safetensors (each rank reads what it holds), or a function that gives
        a stage its parameters; by default those that the model has. `new_modules`: see load_weights. `optimizer` is
        made anew, with its groups and settings, so a learning rate schedule has to come after this; or it is a function
        that makes one for a list of (name, parameter).
        Raises what PipelineTemplate.check does, on every rank.
        """
        self.require_pipelines("configure")
        for template in self.pipelines:  # all of them on every rank: no rank waits for one that has stopped
            template.check(model)
        if not callable(optimizer):
            optimizer = remake_for(optimizer, model)
        if weights is None:
            if any(param.is_meta for param in model.parameters()):
                raise ValueError("the model is on the meta device and has no weights: pass configure(weights=...)")
            weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        is_ours = PipelineTemplate.get_model_name(model) == "model.Llama"
        if is_ours:
            model.dtype = self.compute_dtype  # of its activations; Hugging Face's have that of their parameters
        model = apply_tensor_parallel(forget_values(model.to(self.master_dtype), self.device))
        autocast = self.compute_dtype if self.compute_dtype == torch.bfloat16 and not is_ours else None
        stage = PipelineStage(model, self.template, pgm.process_group_manager.pp_rank, autocast)
        if callable(weights):
            weights(stage)
        else:
            load_weights(stage, weights, self.device, new_modules, seed)
        connect_neighbours()
        grid = pgm.process_group_manager
        torch.manual_seed(seed + 1000 * grid.dp_rank + grid.pp_rank)  # dropout: the same on the tp ranks of a stage
        owners = find_owners(self.pipelines, stage.tied)
        if self.gradient_wire_dtype and all(len(owned.places) == 1 for owned in owners.values()):
            raise ValueError(f"gradient_wire_dtype={self.gradient_wire_dtype}, but each module is held by one pipeline "
                             "and no gradients travel: leave it out (what travels between stages is in wire_dtype)")
        wrapped = DataParallelBucket(stage, owners, self.weight, wire_dtype=self.gradient_wire_dtype)
        return wrapped, optimizer(list(stage.model.named_parameters())), dataloader

    def execute_pipeline(self, data_iter: Iterator[dict], model: nn.Module, criterion: Callable,
                         optimizer: torch.optim.Optimizer, return_loss: bool = True) -> torch.Tensor | None:
        """Forward and backward of one optimizer step; the gradients are then those of the mean over the global batch.

        `criterion(output, batch)`: the mean loss of one micro-batch, called on last stages. Returns the global mean, on
        every rank. Whatever gradients there were are gone; optimizer.step() is up to the caller.
        Raises ValueError for a model that configure did not return, and for what is no iterator.
        """
        self.require_pipelines("execute_pipeline")
        if not isinstance(model, DataParallelBucket):
            raise ValueError(f"execute_pipeline takes the model that configure returns, but got a "
                             f"{type(model).__name__}: write model, optimizer, dataloader = plugin.configure(...)")
        if not hasattr(data_iter, "__next__"):
            raise ValueError(f"execute_pipeline takes an iterator, but a {type(data_iter).__name__} is none: write "
                             "batches = iter(dataloader) before the loop and hand on batches")
        optimizer.zero_grad()
        loss = run_schedule(self.schedule, model, data_iter, criterion, self.own_num_microbatches, self.device,
                            self.wire_dtype)
        if not return_loss:
            return None
        loss *= self.weight if pgm.process_group_manager.tp_rank == 0 else 0.0  # tp ranks have the same one
        dist.all_reduce(loss)
        return loss


def forget_values(model: nn.Module, device: torch.device) -> nn.Module:
    """The parameters on the meta device, in place, where its own .to("meta") would part what is tied.

    Buffers that have values keep them, on `device`: rotary frequencies are in no state dict.
    """
    forgotten: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False):
            meta = forgotten.setdefault(param, nn.Parameter(param.detach().to("meta"), param.requires_grad))
            module._parameters[name] = meta
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer if buffer.is_meta else buffer.to(device)
    return model


def remake_for(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable:
    """A function that makes the optimizer anew, with its groups and settings, for what a stage holds of the model.

    A tied head on a stage of its own has a parameter that the whole model does not list: it goes with its embedding.
    A stage with none of the optimizer's parameters gets one that has nothing to do.
    Raises ValueError where the optimizer has parameters that are not the model's.
    """
    group_of, settings, names = {}, [], {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for i, group in enumerate(optimizer.param_groups):
        if unknown := sum(param not in names for param in group["params"]):
            raise ValueError(f"{unknown} of {len(group['params'])} parameters of the optimizer's group {i} are not the "
                             "model's: make the optimizer of model.parameters(), after the model has its final form")
        settings.append({key: value for key, value in group.items() if key not in ("params", "param_names")})
        group_of.update((name, i) for param in group["params"] for name in names[param])
    accepted = inspect.signature(type(optimizer).__init__).parameters
    defaults = {key: value for key, value in optimizer.defaults.items() if key in accepted}

    def make(held: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [{**values, "params": [(name, param) for name, param in held if group_of.get(name) == i]}
                  for i, values in enumerate(settings)]
        return type(optimizer)([group for group in groups if group["params"]] or groups[:1], **defaults)

    return make
