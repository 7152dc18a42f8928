"""The whole model in one process, which writes by transformers' own generate(): any causal model that it loads."""

import os
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist

from checkpoints.files import ADAPTER
from inference.find import NO_ADAPTER, read_tokenizer, reading
from inference.make_stage import make_model, read_facts, require_memory
from ranks.memory import free_memory
from stage_weights import UNPACKED, look_into
from utils import UserError


class WholeModel:
    """Writes as stages.Writer does. `tokenizer`: the one beside the weights, or the adapter. Raises UserError."""

    def __init__(self, args, device: torch.device, drawing: dict, seed: int, group: dist.ProcessGroup):
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        facts = read_facts(args, None)
        self.tokenizer = read_tokenizer(facts.tokenizer)
        if not hasattr(facts.config, "quantization_config"):  # whose weights are smaller
            require_memory([sum(param.nbytes for param in make_model(facts, args.dtype).parameters())],
                           [free_memory(device)])
        with reading(facts.base):
            self.model, found = AutoModelForCausalLM.from_pretrained(facts.base, dtype=args.dtype,
                                                                     output_loading_info=True)
        if missing := sorted(found["missing_keys"]):
            raise UserError(f"{facts.base} has no weights for {missing[0]}: take a whole model that writes text")
        if scales := [name for name in found["unexpected_keys"] if "scale" in name]:
            raise UserError(f"{facts.base} is quantized ({scales[0]}), {UNPACKED}")
        if facts.adapter:
            self.model = with_adapter(self.model, facts.adapter[0])
        self.model.to(device).eval()
        self.config, self.drawing, self.seed, self.group = self.model.config, drawing, seed, group
        self.has_beams = (self.model.generation_config.num_beams or 1) > 1  # then no token is known before the end
        torch.manual_seed(seed)

    def write(self, prompts: list[list[int]], max_new_tokens: int, show) -> None:
        for k, ids in enumerate(prompts):
            if k:
                torch.manual_seed(self.seed + k)

            def put(value: torch.Tensor, k: int = k) -> None:
                if value.dim() == 1:  # before the first token comes the prompt, (1, T)
                    show(k, value.item())

            inputs = torch.tensor([ids], device=self.model.device)
            out = self.model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **self.drawing,
                                      max_new_tokens=max_new_tokens, pad_token_id=self.tokenizer.eos_token_id,
                                      streamer=None if self.has_beams else SimpleNamespace(put=put, end=bool))
            for token in out[0, len(ids):].tolist() if self.has_beams else ():
                show(k, token)


def with_adapter(model: torch.nn.Module, folder: str) -> torch.nn.Module:
    """The model with an adapter of whichever kind beside its weights. Raises UserError where it is another model's."""
    with reading(folder, NO_ADAPTER), warnings.catch_warnings():
        from peft import PeftModel, get_peft_model_state_dict

        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(model, folder)
        known = get_peft_model_state_dict(model, save_embedding_layers=False)
    names = look_into(os.path.join(folder, ADAPTER), lambda file: file.keys())
    if odd := [name for name in {*known} ^ {*names} if ".lora_" in name]:
        raise UserError(f"{folder} is no adapter for this model: {len(odd)} of its matrices or the model's have no "
                        f"counterpart, among them {min(odd)}")
    return model
