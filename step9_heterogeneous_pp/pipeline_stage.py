"""A pipeline stage out of any model of FAMILIES: the model's own forward, with the other stages' modules replaced.

    GPT-2, middle stage     wte  wpe  drop  h.0   h.1   h.2   h.3   h.4   ln_f  lm_head
    replaced by             Absent ----------->   themselves  Absent ----------------->

Every stage is given the batch (input_ids, attention_mask, pixel_values, ...) and runs the whole forward, so that the
model itself makes masks, rotary tables and residuals. What was received from the stage before, hidden states (B, T, D),
becomes the input of the stage's first own module (here h.1). The absent modules in front of it return tensors of the
right shape whose values are never used. The input of the first absent module behind the stage's own (here h.3) is what
the stage sends. The last stage returns the model's output.

Parameters keep the names they have in the whole model. A head that is tied to an embedding of another stage keeps a
parameter of its own, under the head's name: `tied` says which two names have to stay equal.
"""

import inspect

import torch
import torch.nn as nn

from pipeline_template import PipelineTemplate, listed_modules
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
        return x


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
        self.inputs, self.autocast = inspect.signature(model.forward).parameters.keys() - {"labels"}, autocast
        self.arguments = {"use_cache": False} if "use_cache" in self.inputs else {}  # the cache is for generation
        self.received = self.output = None  # hidden states (B, T, D), during a forward pass
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

        `batch` is the same on every stage. What is no argument of the model's forward is left out, and so are `labels`.
        """
        assert (received is None) == self.is_first, f"stage {self.stage_index} got {type(received).__name__}"
        self.received, self.output = received, None
        inputs = {name: value for name, value in batch.items() if name in self.inputs}
        device_type = next(iter(inputs.values())).device.type
        try:
            with torch.autocast(device_type, self.autocast, enabled=self.autocast is not None):
                out = self.model(**inputs, **self.arguments)
            return out if self.is_last else self.output.to(self.dtype)
        finally:
            self.received = self.output = None  # what is still needed is referenced elsewhere: free the rest

    def hidden_shape(self, **batch) -> tuple[int, int, int]:
        """(B, T, D) of the hidden states for this batch. For ViT, T is one more than an image has patches."""
        if "input_ids" in batch:
            return (*batch["input_ids"].shape, self.config.hidden_size)
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
