"""Text from a checkpoint, an adapter, or any causal model in Hugging Face's layout, by transformers' own generate().

    python cluster/generate.py --checkpoint checkpoints/train_distributed --prompt "The state of the union is"
    python cluster/generate.py --adapter checkpoints/my_run --chat
    python cluster/generate.py --adapter checkpoints/my_run --merge_adapter my_model

A path is a run's folder, whose newest checkpoint is taken, or one of its checkpoints. With --adapter the frozen weights
are those that it was trained beside, or those of --checkpoint. --chat puts what one writes into the tokenizer's chat
template, and without --prompt asks for one line after another, each an answer to what was said before.
"""

import course  # noqa: F401  before step 9's modules

import argparse
import os
import sys
import warnings

from checkpoints.files import ADAPTER, ADAPTER_CONFIG, read_index, read_json, read_latest
from training.common import seed
from utils import (
    ArgumentParser, UserError, choose_device, number, one_clear_error, positive_float, positive_int,
)


temperature = number(float, lambda value: value == 0 or value >= 0.01, "0, or 0.01 or more")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a directory with config.json, safetensors and a tokenizer, or a Hub id")
    parser.add_argument("--adapter", help="a directory with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("--merge_adapter", metavar="OUT", help="write the model with the adapter added to its weights")
    parser.add_argument("--prompt", help="what the text begins with")
    parser.add_argument("--chat", action="store_true", help="the prompt is what a user says, in the chat template")
    parser.add_argument("--max_new_tokens", type=positive_int, default=40)
    parser.add_argument("--temperature", type=temperature, default=0.0,
                        help="0 takes the likeliest token each time; 1 draws from the model's probabilities")
    parser.add_argument("--top_p", type=positive_float, default=1.0, help="draw among the likeliest tokens only, which "
                                                                          "have this probability together")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
                        help="of the weights (default: as they are stored)")
    args = parser.parse_args()
    if not args.checkpoint and not args.adapter:
        raise UserError("name a model: --checkpoint, or --adapter")
    if args.merge_adapter and not args.adapter:
        raise UserError("--merge_adapter writes a model with an adapter: add --adapter")
    if args.prompt is None and not args.chat and not args.merge_adapter:
        raise UserError("write a --prompt, or use --chat")
    if args.prompt is not None and not args.prompt.isprintable():
        raise UserError(f"--prompt {args.prompt!r} has characters that can't be printed: leave them out")
    return args


def find(path: str, flag: str, marks: tuple[str, ...]) -> str:
    """The checkpoint at a path, or the newest one of the run there, which has one of the files `marks`.

    Raises UserError where something is missing.
    """
    given = path
    if latest := read_latest(path):
        path = os.path.join(path, os.path.basename(latest))
    if not any(os.path.isfile(os.path.join(path, mark)) for mark in marks):
        raise UserError(f"{flag} {given!r} has no {' and no '.join(marks)}: name the folder of a run, or one of its "
                        "step_...")
    if os.path.isfile(index := os.path.join(path, "model.safetensors.index.json")):
        missing = {name for name in read_index(index).values() if not os.path.isfile(os.path.join(path, name))}
        if missing:
            raise UserError(f"{path} lacks {', '.join(sorted(missing))}, which its index names: where hosts share no "
                            "disk, copy them here, or take the last checkpoint on the host that started the run")
    return path


def find_model(args) -> tuple[str, str, str | None]:
    """The directories, or Hub ids, of the weights, of the tokenizer, and of the adapter if there is one."""
    base, adapter = args.checkpoint, args.adapter
    if base and os.path.isdir(base):
        base = find(base, "--checkpoint", ("config.json", ADAPTER_CONFIG))
        if not os.path.isfile(os.path.join(base, "config.json")):
            base, adapter = None, adapter or base  # a run that trained an adapter
    elif base and (os.path.isabs(base) or base.count("/") != 1):
        raise UserError(f"--checkpoint {base!r} has no config.json: name the folder of a run, or one of its step_...")
    if adapter is None:
        return base, base, None
    adapter = find(adapter, "--adapter", (ADAPTER_CONFIG,))
    if not os.path.isfile(os.path.join(adapter, ADAPTER)):
        raise UserError(f"{adapter} has no {ADAPTER}: where hosts share no disk, it is on the one that started the run")
    base = base or read_json(os.path.join(adapter, ADAPTER_CONFIG), lambda config: config["base_model_name_or_path"])
    if not base:
        raise UserError(f"{adapter}/{ADAPTER_CONFIG} names no model: add --checkpoint")
    has_tokenizer = os.path.isfile(os.path.join(adapter, "tokenizer_config.json"))
    return base, adapter if has_tokenizer else base, adapter


def load(args, base: str, tokenizer: str, adapter: str | None):
    """The model, in eval mode, and the tokenizer. Raises UserError for what can't be loaded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    device, _, _ = choose_device(args.device, "float32")
    try:
        words = AutoTokenizer.from_pretrained(tokenizer)
        words("")  # fields of a wrong type raise only here
        model = AutoModelForCausalLM.from_pretrained(base, dtype=args.dtype)
    except Exception as error:  # of many classes: transformers', safetensors', tokenizers'
        raise UserError(f"{base} can't be loaded: {' '.join(str(error).split())[:300]}") from None
    return with_adapter(model, adapter).to(device).eval() if adapter else model.to(device).eval(), words


def with_adapter(model, adapter: str):
    """The model with an adapter. Raises UserError where it is another model's."""
    try:
        from peft import PeftModel
    except ImportError:
        raise UserError("--adapter needs the library peft: pip install peft") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("error", UserWarning)  # tensors are missing
            return PeftModel.from_pretrained(model, adapter)
    except Exception as error:
        raise UserError(f"{adapter} is no adapter for this model: {' '.join(str(error).split())[:300]}") from None


def encode(args, tokenizer, talk: list[dict[str, str]]) -> list[int]:
    """The token ids of what the model is asked. Raises UserError where the tokenizer has no chat template."""
    if not args.chat:
        return tokenizer(talk[-1]["content"], add_special_tokens=False)["input_ids"]
    if not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: leave out --chat")
    return tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)


def answer(args, model, tokenizer, talk: list[dict[str, str]]) -> str:
    """The prompt, the content of the last message, and what follows it; with --chat the answer to the conversation.

    A conversation that is too long for the model loses its first turns. Raises UserError for a prompt that is.
    """
    ids, limit = encode(args, tokenizer, talk), getattr(model.config, "max_position_embeddings", None)
    while limit and len(ids) + args.max_new_tokens > limit and len(talk) > 1:
        del talk[:2]
        ids = encode(args, tokenizer, talk)
    if not ids:
        raise UserError(f"--prompt {talk[-1]['content']!r} has no token: write at least one word")
    if limit and len(ids) + args.max_new_tokens > limit:
        raise UserError(f"--prompt has {len(ids)} tokens, and with --max_new_tokens {args.max_new_tokens} it is more "
                        f"than the {limit} positions of the model: shorten one of them")
    import torch

    inputs = torch.tensor([ids], device=model.device)
    drawing = dict(do_sample=True, temperature=args.temperature, top_p=args.top_p) if args.temperature else dict(
        do_sample=False, temperature=None, top_p=None)
    out = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=args.max_new_tokens,
                         pad_token_id=tokenizer.eos_token_id, **drawing)[0]
    return tokenizer.decode(out[len(ids):] if args.chat else out, skip_special_tokens=True)


def merge(model, tokenizer, folder: str) -> None:
    """Adds the adapter to the weights, and writes the model as transformers does. Raises UserError."""
    if os.path.exists(folder):
        raise UserError(f"--merge_adapter {folder!r} exists: choose another name")
    merged = model.merge_and_unload()
    try:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except OSError as error:
        raise UserError(f"--merge_adapter {folder!r} can't be written: {error.strerror}") from None
    print(f"the model with the adapter in its weights: {folder}")


def main():
    args = parse_args()
    places = find_model(args)
    import torch

    torch.manual_seed(args.seed)
    model, tokenizer = load(args, *places)
    if args.merge_adapter:
        merge(model, tokenizer, args.merge_adapter)
    if args.prompt is not None:
        print(answer(args, model, tokenizer, [{"role": "user", "content": args.prompt}]))
    elif args.chat:
        print("write a line, or end with Ctrl-D", flush=True)
        talk = []
        for line in filter(str.strip, sys.stdin):
            talk.append({"role": "user", "content": line.strip()})
            said = answer(args, model, tokenizer, talk)
            talk.append({"role": "assistant", "content": said})
            print(said, flush=True)


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --device cpu, or a smaller model"):
        main()
