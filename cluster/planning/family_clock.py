"""Times the modules of a model of transformers, with or without LoRA, as stages run them: see measure.py.

A model's forward does more than its modules do: masks, rotary tables, residuals. So what is timed is a whole pipeline
stage that holds one module, made of the model on the meta device, where the other modules take no memory:

    first     the embedding                    last     the final norm, the head and the loss
    layer     one decoder layer of each kind   pair     two neighbouring layers, for what is left without a layer

What every stage takes besides its modules is that of the two layers of the pair, each alone, less that of the pair. It
is subtracted from a layer, which has many neighbours in its stage, and left in the first and the last module.
"""

import copy
import gc
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn as nn

from pipeline_stage import PipelineStage
from pipeline_template import PipelineTemplate, listed_modules
from planning.measure import Cost, ModuleClock
from stage_weights import make_buffers
from training.loss import mean_cross_entropy

FIRST, LAST, PAIR = "first", "last", "pair"
FACTS = ("parameters", "frozen_parameters", "saved_bytes", "working_bytes", "fixed_bytes")


class FamilyClock(ModuleClock):
    """As ModuleClock, for `whole`: a whole causal model of transformers, whose weights are not used. `lora`: its
    adapters, or None.

    Raises Unsupported for a model that step 9 can't cut, or whose buffers are not computed with its initial weights.
    """

    last = LAST

    def __init__(self, whole: nn.Module, seq_len: int, dtype: torch.dtype, device: torch.device, lora=None):
        self.whole, self.lora, self.config = on_meta(whole), lora, whole.config
        self.seq_len, self.dtype, self.device = seq_len, dtype, device
        self.before, self.layers, self.behind = listed_modules(self.whole)
        self.names = ["+".join(self.before), *self.layers, "+".join(self.behind)]
        kinds = [self.kind_of(k) for k in range(len(self.layers))]
        self.kinds, counts = kinds, Counter(kinds)
        self.pair = max(range(len(kinds) - 1), key=lambda k: counts[kinds[k]] + counts[kinds[k + 1]], default=None)
        each = 0.5 / (len(counts) + (self.pair is not None))
        self.parts = {FIRST: 0.15, **{f"layer {kinds.index(kind)}": each for kind in counts}, LAST: 0.25}
        if self.pair is not None:
            self.parts[PAIR] = each

    def kind_of(self, k: int) -> str:
        """Layers of one kind have the same modules, parameters of the same shapes, and one entry in layer_types."""
        layer, types = self.whole.get_submodule(self.layers[k]), getattr(self.config, "layer_types", None)
        shapes = [(name, tuple(param.shape)) for name, param in layer.named_parameters()]
        return repr(([type(module).__name__ for module in layer.modules()], shapes, types[k] if types else None))

    def own_names(self, part: str) -> list[str]:
        """The modules of the stage that is timed as this part."""
        if part in (FIRST, LAST):
            return self.before if part == FIRST else self.behind
        if part == PAIR:
            return self.layers[self.pair : self.pair + 2]
        k = int(part.split()[1])
        return self.layers[k : k + 1]

    def build(self, part: str) -> tuple[nn.Module, Callable]:
        """The modules of a part, and the call that its stage makes: of token ids (B, T) or hidden states (B, T, D)."""
        names, model = [*self.before, *self.layers, *self.behind], copy.deepcopy(self.whole)
        own = self.own_names(part)
        start = names.index(own[0])
        cuts = [names[:start], own, names[start + len(own) :]]
        template = PipelineTemplate(PipelineTemplate.get_model_name(model), [cut for cut in cuts if cut])
        master = torch.promote_types(self.dtype, torch.float32)
        autocast = self.dtype if self.dtype == torch.bfloat16 else None
        stage = PipelineStage(model.to(master), template, int(start > 0), autocast)
        self.materialise(stage, has_layers=part not in (FIRST, LAST))
        self.hidden_dtype = stage.dtype
        coefficient = getattr(self.config, "router_aux_loss_coef", 0)

        def call(x: torch.Tensor) -> torch.Tensor:
            if part == FIRST:
                return stage(None, input_ids=x)
            ids = torch.zeros(x.size(0), self.seq_len, dtype=torch.int64, device=self.device)
            out = stage(x, input_ids=ids)
            return mean_cross_entropy(out, {"target_ids": ids}, coefficient) if part == LAST else out

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

    def input_of(self, part: str, size: int) -> torch.Tensor:
        if part == FIRST:
            return torch.randint(self.config.vocab_size, (size, self.seq_len), device=self.device)
        shape = (size, self.seq_len, self.config.hidden_size)
        return torch.randn(shape, dtype=self.hidden_dtype, device=self.device).requires_grad_()

    def measure_part(self, part: str, sizes: list[int], seconds: float, room: float) -> Cost:
        try:
            with torch.autocast(self.device.type, enabled=False):  # the outermost one frees what all passes have cast
                return super().measure_part(part, sizes, seconds, room)
        finally:
            gc.collect()  # a stage and its hooks refer to each other

    def modules_of(self, found: dict[str, Cost]) -> list[Cost]:
        layers = [found[f"layer {self.kinds.index(kind)}"] for kind in self.kinds]
        if self.pair is not None:
            together = added(layers[self.pair], layers[self.pair + 1], 1)
            outside = added(together, found[PAIR], -1)
            kinds = {id(layer): without(layer, outside) for layer in layers}
            layers = [kinds[id(layer)] for layer in layers]
        return [found[FIRST], *layers, found[LAST]]

    def seconds_of_whole(self, size: int, recompute: bool, seconds: float = 3.0) -> float:
        """About what the whole model takes for a micro-batch, forward and backward, without having it in memory."""
        found = self.measure([size], seconds)
        (forward,), (backward,) = found["forward"].values(), found["backward"].values()
        return sum(forward) + sum(backward) + (sum(forward[1:-1]) if recompute else 0.0)

    def extras(self) -> dict:
        """Dtypes of what stages send each other, and of frozen weights."""
        found = {"hidden_dtype": self.hidden_dtype}
        if self.lora:
            found["frozen_dtype"] = self.lora.dtype
        return {name: str(dtype).removeprefix("torch.") for name, dtype in found.items()}


def on_meta(whole: nn.Module) -> nn.Module:
    """A copy of a model without its weights: what is tied stays tied."""
    memo = {id(param): nn.Parameter(param.to("meta"), param.requires_grad) for param in whole.parameters()}
    return copy.deepcopy(whole, memo)


def added(a: Cost, b: Cost, sign: int) -> Cost:
    """The sum, or the difference, of two costs, number by number."""
    facts = {name: a.facts[name] + sign * b.facts[name] for name in FACTS}
    both = sorted(a.seconds.keys() & b.seconds.keys())
    return Cost(facts, {size: [x + sign * y for x, y in zip(a.seconds[size], b.seconds[size])] for size in both})


def without(layer: Cost, outside: Cost) -> Cost:
    """A layer's cost less what a stage takes without layers, which is never taken for more than half of it."""
    saved = layer.facts["saved_bytes"] - max(0.0, outside.facts["saved_bytes"])
    facts = {**layer.facts, "saved_bytes": max(0.0, saved)}
    seconds = {size: [x - min(max(0.0, y), x / 2) for x, y in zip(layer.seconds[size], outside.seconds[size])]
               for size in layer.seconds.keys() & outside.seconds.keys()}
    return Cost(facts, seconds)
