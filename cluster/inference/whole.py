"""The whole model in one process, which writes by transformers' own generate(): any causal model that it loads."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from inference.find import read_tokenizer, reading
from inference.make_stage import add_adapters, dtype_here, make_model, read_adapters, read_facts, require_memory
from ranks.memory import free_memory
from ranks.progress import progress
from stage_weights import UNPACKED
from utils import UserError


class WholeModel:
    """As stages.DividedModel. `tokenizer`: the one beside the weights, or the adapter. Raises UserError."""

    def __init__(self, args, device: torch.device, drawing: dict, seed: int, group: dist.ProcessGroup):
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar, set_tqdm_hook

        disable_progress_bar()
        set_tqdm_hook(lambda _, items, settings: progress("loading weights", *items))
        facts = read_facts(args, None)
        self.tokenizer, model = read_tokenizer(facts.tokenizer), make_model(facts, dtype := dtype_here(args, facts))
        if not hasattr(facts.config, "quantization_config"):  # whose weights are smaller
            require_memory([sum(param.nbytes for param in model.parameters())], [free_memory(device)])
        adapters = facts.adapter and read_adapters(model, *facts.adapter)
        with reading(facts.base):
            model, found = AutoModelForCausalLM.from_pretrained(facts.base, dtype=dtype, output_loading_info=True)
        if missing := sorted(found["missing_keys"]):
            raise UserError(f"{facts.base} has no weights for {missing[0]}: take a whole model that writes text")
        if scales := [name for name in found["unexpected_keys"] if "scale" in name]:
            raise UserError(f"{facts.base} is quantized ({scales[0]}), {UNPACKED}")
        if adapters:
            add_adapters(model, facts.adapter[1], adapters, device)
        self.model, self.config = model.to(device).eval(), model.config
        self.drawing, self.seed, self.group = drawing, seed, group
        torch.manual_seed(seed)

    def generate(self, prompts: list[list[int]], max_new_tokens: int, show) -> None:
        has_beams = (self.model.generation_config.num_beams or 1) > 1  # of which no token is known before the end
        for k, ids in enumerate(prompts):
            if k:
                torch.manual_seed(self.seed + k)
            inputs = torch.tensor([ids], device=self.model.device)
            # What is put first is the prompt, (1, T), and then each token by itself.
            stream = SimpleNamespace(put=lambda new: new.dim() == 1 and show(k, new.item()), end=bool)
            out = self.model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **self.drawing,
                                      max_new_tokens=max_new_tokens, pad_token_id=self.tokenizer.eos_token_id,
                                      streamer=None if has_beams else stream)
            for token in out[0, len(ids):].tolist() if has_beams else ():
                show(k, token)
