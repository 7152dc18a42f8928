"""A pipeline stage out of any model with a plan: the model's own forward, with the other stages' modules replaced.

    GPT-2, middle stage     wte  wpe  drop  h.0   h.1   h.2   h.3   h.4   ln_f  lm_head
    replaced by             Absent ----------->   themselves  Absent ----------------->

Every stage is given the batch (input_ids, attention_mask, pixel_values, ...) and runs the whole forward, so that the
model itself makes masks, rotary tables and residuals. What was received from the stage before, hidden states (B, T, D),
becomes the input of the stage's first own module (here h.1). The absent modules in front of it return tensors of the
right shape whose values are never used. The input of the first absent module behind the stage's own (here h.3) is what
the stage sends. The last stage returns the model's output.

Parameters keep the names they have in the whole model. A head that is tied to an embedding of another stage keeps a
parameter of its own, under the head's name: `tied` says which two names have to stay equal.

The router's loss of a mixture of experts is one of all layers together, so sums travel with the hidden states.
"""

import inspect
import math
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

from pipeline_template import PipelineTemplate, Unsupported, listed_modules
from utils import UserError


class Absent(nn.Module):
    """Stands for a module of another stage: no parameters, no computation.

    A forward may also read an attribute of a module (ViT asks for the dtype of the patch embedding's weight). The
    original answers, which is kept on the meta device, where it takes no memory.
    """

    def __init__(self, original: nn.Module, stage: "PipelineStage", is_behind: bool):
        super().__init__()
        self.outside = (original.to("meta"), stage)  # a tuple, so that their parameters are not this module's
        self.is_behind = is_behind

    def __getattr__(self, name: str):
        if name == "outside":  # not set yet, while this module is being copied
            raise AttributeError(name)
        return getattr(self.outside[0], name)

    def forward(self, *args, **kwargs) -> torch.Tensor:
        stage = self.outside[1]
        if not self.is_behind:
            return stage.received.detach()
        x = next(iter((*args, *kwargs.values())))
        stage.output = x if stage.output is None else stage.output
        return x[..., : getattr(self.outside[0], "out_features", None)]  # a forward may unpack a head's two numbers


class RouterLoss:
    """Stands in for load_balancing_loss_func, a model's auxiliary loss of its mixture of experts (Fedus et al. 2021).

    With E experts it is E * sum over e of (share of the tokens that e gets) * (mean probability of e). Both means are
    over the tokens of all layers, so each stage adds its layers to `sums` (2 E + 1): tokens, probabilities, their
    number. Raises Unsupported where the model's own function is another one.
    """

    def __init__(self, model: nn.Module, module):
        self.module, self.original, self.num_experts = module, module.load_balancing_loss_func, model.num_experts
        self.sums, example = None, (tuple(torch.arange(24.0).sin().view(3, 2, 4)), 4, 2, torch.tensor([[1, 0]]))
        try:
            same = self(*example).isclose(self.original(*example))
        except Exception:  # of any kind: it has other arguments
            same = False
        self.sums = None
        if not same:
            raise Unsupported(f"Auto policy for {PipelineTemplate.get_model_name(model)} with its router's loss is not "
                              "implemented: set output_router_logits=False in its configuration")

    def __call__(self, layers, num_experts: int, top_k: int, attention_mask=None) -> torch.Tensor | int:
        """The loss of all layers so far, those of earlier stages included. `layers`: router logits (B T, E) of each."""
        for logits in layers or ():  # in the dtypes and the order of transformers, to get the same bits
            probabilities = logits.softmax(-1)
            weight = (torch.ones_like(logits[:, :1]) if attention_mask is None else attention_mask.view(-1, 1)).float()
            chosen = torch.zeros_like(logits).scatter_(-1, probabilities.topk(top_k).indices, 1.0)
            parts = chosen.float() * weight, probabilities.float() * weight, weight
            self.sums = torch.cat([part.sum(0) for part in parts]) + (0 if self.sums is None else self.sums)
        if self.sums is None:
            return 0
        tokens, probabilities, number = self.sums.split([num_experts, num_experts, 1])
        return (tokens / number * (probabilities / number)).sum() * num_experts


class PipelineStage(nn.Module):
    """Takes the model over: its modules outside of `template`'s stage `stage_index` are replaced, in place.

    `model`, which has passed template.check, may be on the meta device and may be split over a tp group. It stays an
    attribute, whose named_parameters() are this stage's. `tied`: the names of an embedding and a head that share a
    parameter in the whole model, else None. `autocast` is the dtype of the matmuls where it is not the model's.
    """

    def __init__(self, model: nn.Module, template: PipelineTemplate, stage_index: int,
                 autocast: torch.dtype | None = None):
        super().__init__()
        self.template, self.stage_index = template, stage_index
        self.is_first, self.is_last = stage_index == 0, stage_index == template.num_stages - 1
        self.config, self.tied = model.config, find_tied(model)
        self.inputs, self.autocast = inspect.signature(model.forward).parameters, autocast
        self.takes_any_input = any(parameter.kind is parameter.VAR_KEYWORD for parameter in self.inputs.values())
        base = getattr(model, "base_model", model) if self.takes_any_input else model
        has_cache = "use_cache" in {*self.inputs, *inspect.signature(base.forward).parameters}  # it is for generation
        self.arguments = {"use_cache": False} if has_cache else {}
        self.received = self.output = None  # hidden states (B, T, D), during a forward pass
        module = sys.modules.get(type(model).__module__)
        has_loss = getattr(model.config, "output_router_logits", False) and hasattr(module, "load_balancing_loss_func")
        self.router_loss = RouterLoss(model, module) if has_loss else None
        self.num_sums = 2 * self.router_loss.num_experts + 1 if self.router_loss else 0
        if not self.is_first:
            own = model.get_submodule(template.modules_per_stage[stage_index][0])
            own.register_forward_pre_hook(self.enter, with_kwargs=True)
        for stage, modules in enumerate(template.modules_per_stage):
            for name in modules if stage != stage_index else ():
                parent, _, key = name.rpartition(".")
                absent = Absent(model.get_submodule(name), self, is_behind=stage > stage_index)
                setattr(model.get_submodule(parent), key, absent)
        self.model = model

    def own_layers(self) -> list[nn.Module]:
        """This stage's decoder layers."""
        own, layers = self.template.modules_per_stage[self.stage_index], listed_modules(self.model)[1]
        return [self.model.get_submodule(name) for name in layers if name in own]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the hidden states, which is the model's. Autocast does not change it for residuals."""
        return self.model.dtype

    def enter(self, _module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Replaces the hidden states, the first argument of the stage's first own module, by what was received."""
        if args:
            return (self.received, *args[1:]), kwargs
        return (), {**kwargs, next(iter(kwargs)): self.received}

    def forward(self, received: torch.Tensor | None = None, **batch):
        """Hidden states (B, T, D), None on the first stage -> hidden states, on the last stage the model's output.

        `batch` is the same on every stage. What is no argument of the model's forward is left out, and so are `labels`
        and `target_ids`. A forward with **kwargs takes any other name, as those of packed samples (cu_seq_lens_q).
        """
        assert (received is None) == self.is_first, f"stage {self.stage_index} got {type(received).__name__}"
        inputs = {name: value for name, value in batch.items()
                  if name not in ("labels", "target_ids") and (name in self.inputs or self.takes_any_input)}
        self.received, self.output, router_loss = received, None, self.router_loss
        if router_loss:
            router_loss.sums, router_loss.module.load_balancing_loss_func = None, router_loss
            if received is not None:
                length = batch["input_ids"].size(1)
                self.received = received[:, :length]
                router_loss.sums = received[:, length:].flatten()[: self.num_sums].float()
        device_type = next(value.device.type for value in inputs.values() if isinstance(value, torch.Tensor))
        try:
            with torch.autocast(device_type, self.autocast, enabled=self.autocast is not None):
                out = self.model(**inputs, **self.arguments)
            if self.is_last:
                return out
            return self.with_sums(self.output.to(self.dtype)) if router_loss else self.output.to(self.dtype)
        finally:
            self.received = self.output = None  # what is still needed is referenced elsewhere: free the rest
            if router_loss:
                router_loss.sums, router_loss.module.load_balancing_loss_func = None, router_loss.original

    def with_sums(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(B, T + R, D): hidden states (B, T, D), and the router's sums in the first of B R further rows of zeros."""
        shape, sums = self.hidden_shape(input_ids=hidden_states[:, :, 0]), self.router_loss.sums
        sums = hidden_states.new_zeros(0) if sums is None else sums.to(hidden_states.dtype)
        rows = F.pad(sums, (0, math.prod(shape) - hidden_states.numel() - len(sums)))
        return torch.cat([hidden_states, rows.view(shape[0], -1, shape[2])], dim=1)

    def hidden_shape(self, **batch) -> tuple[int, int, int]:
        """(B, T, D) of what stages send for this batch. For ViT, T is 1 + its patches. For with_sums, R is added."""
        if "input_ids" in batch:
            batch_size, length = batch["input_ids"].shape
            return batch_size, length + math.ceil(self.num_sums / self.config.hidden_size), self.config.hidden_size
        if "pixel_values" not in batch:
            raise UserError(f"the batch has {', '.join(batch) or 'nothing'}, but neither input_ids nor pixel_values: "
                            "name the model's inputs as its forward does")
        batch_size, _, height, width = batch["pixel_values"].shape
        patches = (height // self.config.patch_size) * (width // self.config.patch_size)
        return batch_size, patches + 1, self.config.hidden_size


def find_tied(model: nn.Module) -> tuple[str, str] | None:
    """The names of a parameter that modules before and after the decoder layers share. None where there is none."""
    first, _, last = listed_modules(model)
    names: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name.startswith(tuple(f"{module}." for module in first)):
            names.setdefault(param, name)
        elif name.startswith(tuple(f"{module}." for module in last)) and param in names:
            return names[param], name
    return None
