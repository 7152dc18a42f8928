"""A model that is divided over the stages of a pipeline writes text.

    one prompt, a            stage 0   a . . a . . a .        Each prompt is a micro-batch of its own: first all of its
                             stage 1   . a . . a . . a        tokens, then one at a time. The last stage draws the next
                             stage 2   . . a . . a . .        token and sends its id to all; the first one embeds it.

    prompts a, b, c          stage 0   a b c a b c a b        Several prompts fill the pipeline, so that all stages work
                             stage 1   . a b c a b c a        at the same time: so many tokens more in the same time.
                             stage 2   . . a b c a b c

What travels is one hidden state a token, (1, 1, D), and ids. A stage keeps keys and values of its own layers only, for
each prompt in a Cache of transformers. A model asks the cache's layer 0 how many tokens came before. Only the first
stage of a pipeline has this layer, so each stage numbers its layers from 0 on: else positions and masks would be
wrong on the others, silently, from the second token on.
"""

import inspect
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

import process_group_manager as pgm
from models.causal import forward
from pipeline_parallel import StageCommunication
from pipeline_stage import Absent, PipelineStage
from pipeline_template import Unsupported, listed_modules, names_of
from utils import UserError

CACHE_NAMES = "cache", "past_key_values"  # the second until transformers 5.23
ATTENTION = "get_mask_sizes"  # what only a cache's layers of attention have


def name_of_cache(model: torch.nn.Module) -> str:
    """By which argument the model's forward takes it. Raises Unsupported."""
    takes = {*inspect.signature(model.forward).parameters, *inspect.signature(model.base_model.forward).parameters}
    found = next((name for name in CACHE_NAMES if name in takes), None)
    if not found:
        raise Unsupported(f"{type(model).__name__} takes no {' or '.join(CACHE_NAMES)}: start generate.py without "
                          "torchrun, since one process writes with it")
    return found


class DividedModel:
    """Generates text with this rank's stage. `drawing`: what GenerationConfig takes, of how the next token is drawn.

    `group`: of all ranks on the CPU, for the ids; ranks wait in it for as long as a user thinks. Prompt k's tokens are
    drawn by `seed` + k, so they do not depend on the other prompts. All ranks make one together. Raises UserError.
    """

    def __init__(self, stage: PipelineStage, device: torch.device, drawing: dict, seed: int, group: dist.ProcessGroup):
        self.config = stage.config
        self.stage, self.device, self.drawing, self.seed, self.group = stage, device, drawing, seed, group
        self.communication, self.generators = StageCommunication(stage.dtype, device), {}
        layers = stage.model.get_submodule(listed_modules(stage.model)[1][0].rpartition(".")[0])
        self.first = next(i for i, layer in enumerate(layers) if not isinstance(layer, Absent))
        for number, layer in enumerate(stage.own_layers()):
            for module in layer.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = number
        with pgm.together(group):
            self.cache_name = name_of_cache(stage.model)
            if not any(hasattr(layer, ATTENTION) for layer in self.make_cache().layers):
                raise UserError(f"stage {stage.stage_index} of {len(stage.own_layers())} layers has none of attention, "
                                "by which a stage counts earlier tokens: give it more layers, by --pipelines")

    @names_of("transformers")
    def make_cache(self):
        from transformers import DynamicCache

        cache = DynamicCache(config=self.stage.config)
        cache.layers = cache.layers[self.first : self.first + len(self.stage.own_layers())]
        return cache

    @torch.no_grad()
    def generate(self, prompts: list[list[int]], max_new_tokens: int, show: Callable[[int, int], None]) -> None:
        """Calls show(k, id) on all ranks for each token that follows a prompt, in the same order. Collective.

        `prompts`: the ids of each, the same on all ranks. A prompt is over after max_new_tokens, or an end of the text.
        """
        self.sequences, self.caches = [list(ids) for ids in prompts], [self.make_cache() for _ in prompts]
        self.drawn, self.sending = deque(), [[] for _ in prompts]
        if self.stage.is_last:
            self.draws = [self.make_draw(k, len(ids), max_new_tokens) for k, ids in enumerate(prompts)]
        for k, ids in enumerate(prompts):
            self.forward(k, ids)
        left = len(prompts)
        while left:
            k, token, is_over = self.next_token()
            self.sequences[k].append(token)
            show(k, token)
            if is_over:
                left, self.caches[k] = left - 1, None
            else:
                self.forward(k, [token])
        self.communication.finish()
        for k in range(len(prompts)):
            self.finish_sending(k)

    def forward(self, k: int, ids: list[int]) -> None:
        """Passes the next tokens of prompt k through this stage. The last one then draws another, and tells the others.
        """
        stage = self.stage
        stage.arguments = {"use_cache": True, self.cache_name: self.caches[k]}
        if "logits_to_keep" in stage.inputs:
            stage.arguments["logits_to_keep"] = 1
        out = forward(stage, self.communication, k, {"input_ids": torch.tensor([ids], device=self.device)})
        if not stage.is_last:
            return
        token, is_over = self.draws[k](out.logits[:, -1].float())
        self.drawn.append((k, token, is_over))
        self.finish_sending(k)  # without waiting: the other stages have taken in the id before this one
        message = torch.tensor([k, token, is_over])
        self.sending[k] = [(dist.isend(message, rank, group=self.group), message)
                           for rank in range(self.group.size() - 1)]

    def finish_sending(self, k: int) -> None:
        for handle, _ in self.sending[k]:
            handle.wait()

    def next_token(self) -> tuple[int, int, int]:
        """(k, id, is_over) of the token that was drawn next, of whichever prompt."""
        if self.stage.is_last:
            return self.drawn.popleft()
        message = torch.empty(3, dtype=torch.int64)
        dist.recv(message, self.group.size() - 1, group=self.group)
        return tuple(message.tolist())

    @names_of("transformers")
    def make_draw(self, k: int, length: int, max_new_tokens: int) -> Callable:
        """draw(logits (1, V)) -> (id, is_over) of the next token of prompt k, as the model's generate() draws it."""
        from transformers import GenerationConfig, LogitsProcessorList

        model, limit = self.stage.model, length + max_new_tokens
        config, _ = model._prepare_generation_config(GenerationConfig(**self.drawing, max_length=limit))
        model._prepare_special_tokens(config, device=self.device)
        process = model._get_logits_processor(config, length, logits_processor=LogitsProcessorList(),
                                              device=self.device, model_kwargs={})
        ends = [] if config._eos_token_tensor is None else config._eos_token_tensor.tolist()
        if k not in self.generators:
            self.generators[k] = torch.Generator(self.device).manual_seed(self.seed + k)

        def draw(logits: torch.Tensor) -> tuple[int, bool]:
            ids = self.sequences[k]
            scores = process(torch.tensor([ids], device=self.device), logits)
            if config.do_sample:
                token = torch.multinomial(scores.softmax(-1), 1, generator=self.generators[k]).item()
            else:
                token = scores.argmax(-1).item()
            return token, token in ends or len(ids) + 1 == limit

        return draw
