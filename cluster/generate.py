"""Text from a checkpoint, or from any causal model in Hugging Face's layout, by transformers' own generate().

    python cluster/generate.py --checkpoint checkpoints/train_distributed --prompt "The state of the union is"

--checkpoint is a run's folder, whose newest checkpoint is taken, or one of its checkpoints.
"""

import course  # noqa: F401  before step 9's modules

import argparse
import os

from training.checkpoint_files import read_index
from training.common import seed
from utils import (
    ArgumentParser, UserError, choose_device, number, one_clear_error, positive_float, positive_int,
)


temperature = number(float, lambda value: value == 0 or value >= 0.01, "0, or 0.01 or more")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", required=True, help="a directory with config.json, safetensors and a tokenizer")
    parser.add_argument("--prompt", required=True, help="what the text begins with")
    parser.add_argument("--max_new_tokens", type=positive_int, default=40)
    parser.add_argument("--temperature", type=temperature, default=0.0,
                        help="0 takes the likeliest token each time; 1 draws from the model's probabilities")
    parser.add_argument("--top_p", type=positive_float, default=1.0, help="draw among the likeliest tokens only, which "
                                                                          "have this probability together")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    return parser.parse_args()


def find(path: str) -> str:
    """The checkpoint at a path, or the newest one of the run there. Raises UserError where something is missing."""
    if os.path.isfile(latest := os.path.join(path, "latest")):
        with open(latest, encoding="utf-8", errors="replace") as file:
            path = os.path.join(path, os.path.basename(file.read().strip()))
    if not os.path.isfile(os.path.join(path, "config.json")):
        raise UserError(f"--checkpoint {path!r} has no config.json: name the folder of a run, or one of its step_...")
    if os.path.isfile(index := os.path.join(path, "model.safetensors.index.json")):
        missing = {name for name in read_index(index).values() if not os.path.isfile(os.path.join(path, name))}
        if missing:
            raise UserError(f"{path} lacks {', '.join(sorted(missing))}, which its index names: where hosts share no "
                            "disk, copy them here, or take the run's last checkpoint, which the first host has whole")
    return path


def main():
    args = parse_args()
    if not args.prompt.isprintable():
        raise UserError(f"--prompt {args.prompt!r} has characters that can't be printed: leave them out")
    path = find(args.checkpoint)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device, _, _ = choose_device(args.device, "float32")
    torch.manual_seed(args.seed)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path).to(device).eval()
    except Exception as error:  # of many classes: transformers', safetensors', tokenizers'
        raise UserError(f"{path} can't be loaded: {' '.join(str(error).split())[:300]}") from None
    inputs = tokenizer(args.prompt, return_tensors="pt", add_special_tokens=False).to(device)
    inputs.pop("token_type_ids", None)
    if inputs["input_ids"].shape[1] == 0:
        raise UserError(f"--prompt {args.prompt!r} has no token: write at least one word")
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and (length := inputs["input_ids"].shape[1]) + args.max_new_tokens > limit:
        raise UserError(f"--prompt has {length} tokens, and with --max_new_tokens {args.max_new_tokens} it is more "
                        f"than the {limit} positions of the model: shorten one of them")
    drawing = dict(do_sample=True, temperature=args.temperature, top_p=args.top_p) if args.temperature else dict(
        do_sample=False)
    ids = model.generate(**inputs, max_new_tokens=args.max_new_tokens, pad_token_id=tokenizer.eos_token_id, **drawing)
    print(tokenizer.decode(ids[0], skip_special_tokens=True))


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --device cpu, or a smaller model"):
        main()
