"""The whole model in one process, which writes by transformers' own generate()."""

import os
import warnings

import torch
import torch.distributed as dist

from inference.find import NO_ADAPTER, find_model, read_tokenizer, reading
from stage_weights import UNPACKED
from utils import UserError


class WholeModel:
    """Writes as stages.Writer does. `tokenizer`: the one beside the weights, or the adapter. Raises UserError."""

    def __init__(self, args, device: torch.device, drawing: dict, group: dist.ProcessGroup):
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        base, tokenizer, adapter = find_model(args)
        self.tokenizer = read_tokenizer(tokenizer)
        with reading(base):
            self.model, found = AutoModelForCausalLM.from_pretrained(base, dtype=args.dtype, output_loading_info=True)
        if missing := sorted(found["missing_keys"]):
            raise UserError(f"{base} has no weights for {missing[0]}: take a whole model that writes text")
        if scales := [name for name in found["unexpected_keys"] if "scale" in name]:
            raise UserError(f"{base} is quantized ({scales[0]}), {UNPACKED}")
        if adapter:
            self.model = with_adapter(self.model, adapter)
        if args.merge_adapter:
            self.model = merge(self.model, self.tokenizer, args.merge_adapter)
        self.model.to(device).eval()
        self.config, self.drawing, self.seed, self.group = self.model.config, drawing, args.seed, group
        torch.manual_seed(self.seed)

    def write(self, prompts: list[list[int]], max_new_tokens: int, show) -> None:
        for k, ids in enumerate(prompts):
            if k:
                torch.manual_seed(self.seed + k)
            inputs = torch.tensor([ids], device=self.model.device)
            out = self.model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), **self.drawing,
                                      max_new_tokens=max_new_tokens, pad_token_id=self.tokenizer.eos_token_id)
            for token in out[0, len(ids):].tolist():
                show(k, token)


def with_adapter(model, adapter: str):
    """The model with an adapter. Raises UserError where it is another model's."""
    with reading(adapter, NO_ADAPTER), warnings.catch_warnings():
        from peft import PeftModel

        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("error", UserWarning)  # tensors are missing
        return PeftModel.from_pretrained(model, adapter)


def merge(model, tokenizer, folder: str):
    """Adds the adapter to the weights, and writes the model as transformers does. Returns it. Raises UserError."""
    if os.path.exists(folder):
        raise UserError(f"--merge_adapter {folder!r} exists: choose another name")
    merged = model.merge_and_unload()
    try:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise UserError(f"--merge_adapter {folder!r} can't be written: {error.strerror}") from None
    print(f"the model with the adapter in its weights: {folder}")
    return merged
