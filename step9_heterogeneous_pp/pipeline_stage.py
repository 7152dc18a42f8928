"""A pipeline stage out of any model of FAMILIES: the model's own forward, with the other stages' modules replaced.

    GPT-2, stage 1 of 3      wte   wpe  drop  h.0   h.1   h.2   h.3   h.4   ln_f  lm_head
    stands there             Absent ------------->  itself ---->  Absent --------------->
    makes of its input       received, 0, x,  x                   x, and the first one keeps it: to send

Every stage is given the batch (input_ids, attention_mask, pixel_values, ...) and runs the whole forward, so that masks,
rotary tables and residuals are made by the model itself. The first absent embedding hands out the hidden states
(B, T, D) that were received, those that are added to it give zeros. Any other absent module hands on its input, and the
input of the first one after the stage's own modules is the stage's output. The last stage returns the model's output.

Parameters keep the names they have in the whole model. A head that is tied to an embedding of another stage keeps a
parameter of its own, under the head's name: `tied` says which two names have to stay equal.
"""

import inspect

import torch
import torch.nn as nn

from pipeline_template import PipelineTemplate, family_of, listed_modules


class Wire:
    """What flows in and out of a stage during one forward pass: hidden states (B, T, D)."""

    received: torch.Tensor | None = None  # until the first absent embedding takes it
    hidden: torch.Tensor | None = None  # after that
    output: torch.Tensor | None = None


class Absent(nn.Module):
    """Stands for a module of another stage: no parameters, no computation.

    A forward may also read an attribute of a module (ViT asks which dtype the patch embedding's weight has). The
    original answers; it is kept on the meta device, where it takes no memory.
    """

    def __init__(self, original: nn.Module, wire: Wire, is_behind: bool):
        super().__init__()
        self.original = (original.to("meta"),)  # in a tuple, so that its parameters are not this module's
        self.wire, self.is_behind = wire, is_behind

    def __getattr__(self, name: str):
        if name == "original":  # not there yet: while it is copied
            raise AttributeError(name)
        return getattr(self.original[0], name)

    def forward(self, *args, **kwargs) -> torch.Tensor:
        x, wire = next(iter((*args, *kwargs.values()))), self.wire
        if self.is_behind:
            wire.output = x if wire.output is None else wire.output
            return x
        if wire.received is not None:
            wire.hidden, wire.received = wire.received, None
            return wire.hidden
        if isinstance(self.original[0], nn.Embedding):
            return wire.hidden.new_zeros(()).expand_as(wire.hidden)
        return x


class PipelineStage(nn.Module):
    """Takes the model over: its modules outside of `template`'s stage `stage_index` are replaced, in place.

    `model` may be on the meta device and may be split over a tp group. It stays an attribute, whose named_parameters()
    are this stage's, under the whole model's names. `tied` is (embedding's name, head's name) where the whole model has
    these two share a parameter, else None. `autocast`: the dtype of the matmuls, where it is not the model's.
    Raises what template.check(model) raises.
    """

    def __init__(self, model: nn.Module, template: PipelineTemplate, stage_index: int,
                 autocast: torch.dtype | None = None):
        super().__init__()
        template.check(model)
        assert 0 <= stage_index < template.num_stages, f"stage {stage_index} of {template.num_stages}"
        self.template, self.stage_index = template, stage_index
        self.is_first, self.is_last = stage_index == 0, stage_index == template.num_stages - 1
        self.config, self.tied = model.config, find_tied(model)
        self.arguments, self.autocast = family_of(model).arguments, autocast
        self.inputs = inspect.signature(model.forward).parameters.keys() - {"labels"}
        self.wire = Wire()
        for stage, modules in enumerate(template.modules_per_stage):
            for name in modules if stage != stage_index else ():
                parent, _, key = name.rpartition(".")
                absent = Absent(model.get_submodule(name), self.wire, is_behind=stage > stage_index)
                setattr(model.get_submodule(parent), key, absent)
        self.model = model

    @property
    def dtype(self) -> torch.dtype:
        """That of the hidden states: the model's. Autocast, too, leaves residuals in it."""
        return self.model.dtype

    def forward(self, received: torch.Tensor | None = None, **batch):
        """Hidden states (B, T, D), None on the first stage -> hidden states, on the last stage the model's output.

        `batch`: the same on every stage. What is no argument of the model's forward is left out, and so are `labels`:
        the loss is made outside of the model.
        """
        assert (received is None) == self.is_first, f"stage {self.stage_index} got {type(received).__name__}"
        wire = self.wire
        wire.received, wire.output = received, None
        inputs = {name: value for name, value in batch.items() if name in self.inputs}
        device_type = next(iter(inputs.values())).device.type
        try:
            with torch.autocast(device_type, self.autocast, enabled=self.autocast is not None):
                out = self.model(**inputs, **self.arguments)
            return out if self.is_last else wire.output.to(self.dtype)
        finally:
            wire.received = wire.hidden = wire.output = None  # whoever needs them has them: free memory

    def hidden_shape(self, **batch) -> tuple[int, int, int]:
        """(B, T, D) of what stages send each other for this batch; for ViT T is one more than an image has patches.

        Raises ValueError for a batch that does not tell.
        """
        if "input_ids" in batch:
            return (*batch["input_ids"].shape, self.config.hidden_size)
        if "pixel_values" not in batch:
            raise ValueError(f"the batch has {', '.join(batch) or 'nothing'}, but neither input_ids nor pixel_values, "
                             "which say what shape the hidden states have: name the model's inputs as its forward does")
        batch_size, _, height, width = batch["pixel_values"].shape
        patches = (height // self.config.patch_size) * (width // self.config.patch_size)
        return batch_size, patches + 1, self.config.hidden_size


def find_tied(model: nn.Module) -> tuple[str, str] | None:
    """The names of a parameter that modules before and after the decoder layers share, None where there is none."""
    first, _, last = listed_modules(model)
    names: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if name.startswith(tuple(f"{module}." for module in first)):
            names.setdefault(param, name)
        elif name.startswith(tuple(f"{module}." for module in last)) and param in names:
            return names[param], name
    return None
