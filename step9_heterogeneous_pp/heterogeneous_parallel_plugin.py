"""Pipelines of unlike shapes that train one model together: what a training script needs, in five calls.

    plugin = HeterogeneousParallelPlugin(microbatch_size=2)
    plugin.set_pipelines([two_stages, one_stage], num_microbatches={two_stages: 6, one_stage: 2})
    dataloader = plugin.prepare_dataloader(dataset)
    model, optimizer, dataloader = plugin.configure(model, optimizer, dataloader)

    batches = iter(dataloader)
    for step in range(dataloader.steps_per_epoch):
        loss = plugin.execute_pipeline(batches, model, criterion, optimizer)
        plugin.clip_grad_norm(model, max_norm=1.0)
        optimizer.step()

Two machines of unlike speed can be two pipelines of one stage, and three small ones one pipeline of three stages.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn as nn

import process_group_manager as pgm
from data_parallel import Bucket, DataParallelBucket
from dataloader import HeterogeneousDataLoader
from hf_tensor_parallel import apply_tensor_parallel
from model import Llama
from pipeline_parallel import StageCommunication, connect_neighbours, one_f_one_b, run_schedule
from pipeline_stage import PipelineStage
from pipeline_template import PipelineTemplate
from process_group_manager import Mismatch
from stage_weights import load_weights, share_weights
from tensor_parallel import clip_grad_norm
from utils import UserError, choose_device, compile_layers, recompute_layers

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp64": "float64"}  # older names of the precision -> --dtype's


class HeterogeneousParallelPlugin:
    """`microbatch_size` samples pass a pipeline at once, and `tp_size` ranks share each stage.

    `precision` and `device` are as --dtype and --device of train.py: "auto", "float32", "bfloat16" or "float64" of the
    computation, whatever the model says. With "bfloat16", parameters and optimizer state stay float32.
    `schedule` is one of pipeline_parallel. With `recompute`, backward computes decoder layers once more and so needs
    less memory. With `compile`, they are compiled. Joins the process group, if the script has not done so: ranks wait
    `timeout` seconds for each other, and are given the same `flags`, which init_process_group compares.
    Raises UserError for an unknown precision, and where choose_device, init_process_group and compile_layers do.
    """

    def __init__(self, tp_size: int = 1, microbatch_size: int = 1, precision: str = "float32", device: str = "auto",
                 schedule: Callable = one_f_one_b, recompute: bool = False, timeout: float = 600,
                 compile: bool = False, flags: dict | None = None):
        if precision not in (*DTYPES, *DTYPES.values(), "auto"):
            raise UserError(f"precision={precision!r} is none of auto, {', '.join(DTYPES.values())}")
        self.tp_size, self.microbatch_size = tp_size, microbatch_size
        self.schedule, self.recompute, self.compile = schedule, recompute, compile
        self.communication, self.bucket_class = StageCommunication, Bucket  # a script may set others
        self.replica_class = DataParallelBucket
        self.device, self.compute_dtype, backend = choose_device(device, DTYPES.get(precision, precision))
        self.master_dtype = torch.promote_types(self.compute_dtype, torch.float32)
        self.pipelines: list[PipelineTemplate] = []
        if not dist.is_initialized():
            pgm.init_process_group(backend, timeout, {**(flags or {}), "dtype": self.compute_dtype})

    def set_pipelines(self, pipelines: list[PipelineTemplate],
                      num_microbatches: Mapping[PipelineTemplate, int] | list[int]) -> None:
        """Sets the pipelines, and the micro-batches of a step that each takes, by template or one number per pipeline.

        Afterwards `dp_size` is the number of pipelines, `pp_size` that of this rank's stages, `global_batch_size` and
        `train_batch_size` are the samples of an optimizer step, all of them and those of this pipeline.
        Raises Mismatch where the ranks do not match, or a number is missing or less than one.
        """
        if isinstance(num_microbatches, Mapping):
            num_microbatches = [num_microbatches.get(template) for template in pipelines]  # None where it has no number
        is_list = isinstance(num_microbatches, (list, tuple)) and len(num_microbatches) == len(pipelines) > 0
        if not is_list or not all(type(count) is int and count > 0 for count in num_microbatches):
            raise Mismatch(f"All pipelines must have a corresponding number of microbatches: got {num_microbatches!r} "
                           f"for {len(pipelines)} pipelines: give a dictionary or a list with 1 or more for each")
        pgm.setup_process_group_manager([template.num_stages for template in pipelines], self.tp_size)
        grid = pgm.process_group_manager
        self.pipelines, self.num_microbatches = list(pipelines), list(num_microbatches)
        self.template, self.own_num_microbatches = pipelines[grid.dp_rank], num_microbatches[grid.dp_rank]
        self.dp_size, self.pp_size = len(pipelines), self.template.num_stages
        self.global_batch_size = self.microbatch_size * sum(num_microbatches)
        self.train_batch_size = self.microbatch_size * self.own_num_microbatches

    def require_pipelines(self, call: str) -> None:
        if not self.pipelines:
            raise UserError(f"{call} needs the pipelines: call set_pipelines first")

    def prepare_dataloader(self, dataset, shuffle: bool = False, seed: int = 0, collate_fn: Callable | None = None,
                           num_workers: int = 0) -> HeterogeneousDataLoader:
        """This pipeline's share of the data set. collate_fn turns a list of its items into a dictionary of inputs."""
        self.require_pipelines("prepare_dataloader")
        return HeterogeneousDataLoader(dataset, self.microbatch_size, self.num_microbatches,
                                       pgm.process_group_manager.dp_rank, self.device, self.master_dtype, shuffle, seed,
                                       collate_fn, num_workers)

    def configure(self, model: nn.Module, optimizer: torch.optim.Optimizer | Callable, dataloader=None, weights=None,
                  seed: int = 0):
        """Keeps this rank's part of the model. Returns it, the optimizer of its parameters, and the dataloader.

        `weights`: a state dict, a directory with safetensors (each rank reads what it holds), or a function that gives
        a stage its parameters. By default they are those of rank 0's model. `seed` is that of dropout. `optimizer`
        keeps those of its parameters that this rank holds, or is a function that makes one of [(name, parameter), ...].
        Raises what PipelineTemplate.check raises and, for weights that one can't read, UserError, on every rank; and
        UserError for an optimizer of another model.
        """
        self.require_pipelines("configure")
        for template in self.pipelines:  # every rank checks all of them, so that all ranks stop
            template.check(model)
        names = names_by_group(optimizer, model) if isinstance(optimizer, torch.optim.Optimizer) else None
        if weights is None and any(param.is_meta for param in model.parameters()):
            raise UserError("the model is on the meta device and has no weights: pass configure(weights=...)")
        is_ours = isinstance(model, Llama)
        if is_ours:
            model.dtype = self.compute_dtype  # activations of Hugging Face's models have their parameters' dtype
        model = model.to(self.master_dtype)
        if weights is None:
            share_weights(model, self.device)
        model = apply_tensor_parallel(model)
        autocast = self.compute_dtype if self.compute_dtype == torch.bfloat16 and not is_ours else None
        stage = PipelineStage(model, self.template, pgm.process_group_manager.pp_rank, autocast)
        with pgm.together():
            if callable(weights):
                weights(stage)
            elif weights is not None:
                load_weights(stage, weights, self.device)
            stage.model.to(self.device)
            if self.compile:
                compile_layers(stage.own_layers(), self.device)
        if self.recompute:  # after that: what is computed again is compiled, too
            recompute_layers(stage.own_layers())
        connect_neighbours()
        grid = pgm.process_group_manager
        torch.manual_seed(seed + 1000 * grid.dp_rank + grid.pp_rank)  # dropout: the same on the tp ranks of a stage
        held = dict(stage.model.named_parameters())
        if names is None:
            optimizer = optimizer(list(held.items()))
        else:
            for group, names_of_group in zip(optimizer.param_groups, names):
                group["param_names"] = [name for name in names_of_group if name in held]
                group["params"] = [held[name] for name in group["param_names"]]
        return self.replica_class(stage, self.pipelines, bucket_class=self.bucket_class), optimizer, dataloader

    def execute_pipeline(self, data_iter: Iterator[dict], model: nn.Module, criterion: Callable,
                         optimizer: torch.optim.Optimizer, return_loss: bool = True) -> torch.Tensor | None:
        """Forward and backward of one optimizer step. The gradients are then those of the mean over the global batch.

        `criterion(output, batch)` is the mean loss of one micro-batch and is called on last stages. Returns the mean
        over the global batch on every rank. Older gradients are dropped. The caller calls optimizer.step().
        Raises UserError for a model that configure did not return, and for anything but an iterator.
        """
        self.require_pipelines("execute_pipeline")
        if not isinstance(model, DataParallelBucket):
            raise UserError(f"execute_pipeline takes the model that configure returns, but got a "
                            f"{type(model).__name__}: write model, optimizer, dataloader = plugin.configure(...)")
        if not hasattr(data_iter, "__next__"):
            raise UserError(f"execute_pipeline takes an iterator, but a {type(data_iter).__name__} is none: write "
                            "batches = iter(dataloader) before the loop and pass batches")
        model.zero_grad()  # also of parameters that the optimizer does not have
        with torch.autocast(self.device.type, enabled=False):  # the outermost one frees the casts that all share
            loss = run_schedule(self.schedule, model, data_iter, criterion, self.num_microbatches,
                                self.communication(model.module.dtype, self.device))
        if not return_loss:
            return None
        loss *= pgm.process_group_manager.tp_rank == 0  # the ranks of a tp group have the same loss: count it once
        dist.all_reduce(loss)
        return loss

    def clip_grad_norm(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Call it after execute_pipeline. See tensor_parallel.clip_grad_norm."""
        return clip_grad_norm(model.module.model, max_norm, model.module.tied and model.module.tied[1])


def names_by_group(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[list[str]]:
    """The names of the parameters in each group of the optimizer. A tied parameter has two.

    Raises UserError where the optimizer has parameters that are not the model's.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    for i, group in enumerate(optimizer.param_groups):
        if unknown := sum(param not in names for param in group["params"]):
            raise UserError(f"{unknown} of {len(group['params'])} parameters of the optimizer's group {i} are not the "
                            "model's: make the optimizer of model.parameters(), after the model has its final form")
    return [[name for param in group["params"] for name in names[param]] for group in optimizer.param_groups]
