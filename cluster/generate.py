"""Text from a checkpoint, an adapter, or any causal model in Hugging Face's layout.

    python cluster/generate.py --checkpoint checkpoints/train_distributed --prompt "The state of the union is"
    python cluster/generate.py --adapter checkpoints/my_run --chat
    python cluster/generate.py --adapter checkpoints/my_run --merge_adapter my_model
    torchrun --nproc_per_node 3 cluster/generate.py --checkpoint models/large --pipelines "3,2,1" --prompt "Once upon"

A path is a run's folder, whose newest checkpoint is taken, or one of its checkpoints. With --adapter the frozen weights
are those that it was trained beside, or those of --checkpoint. --chat puts what one writes into the tokenizer's chat
template, and without --prompt asks for one line after another, each an answer to what was said before. One process
writes by transformers' own generate(). Several divide the model, which none of them need be able to hold: see
inference/.
"""

from ranks import course  # noqa: F401  before step 9's modules

import argparse
import os
import sys
import warnings

from hosts.host_facts import ASKS
from inference.find import find_model
from inference.prompts import drawing, fit, require_input
from run.flags import seed
from train import counts
from utils import ArgumentParser, UserError, choose_device, number, one_clear_error, positive_float, positive_int

temperature = number(float, lambda value: value == 0 or value >= 0.01, "0, or 0.01 or more")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a directory with config.json, safetensors and a tokenizer, or a Hub id")
    parser.add_argument("--adapter", help="a directory with adapter_config.json and adapter_model.safetensors")
    parser.add_argument("--merge_adapter", metavar="OUT", help="write the model with the adapter added to its weights")
    parser.add_argument("--prompt", action="append", help="what the text begins with; give it again for more texts")
    parser.add_argument("--chat", action="store_true", help="the prompt is what a user says, in the chat template")
    parser.add_argument("--max_new_tokens", type=positive_int, default=40)
    parser.add_argument("--temperature", type=temperature, default=0.0,
                        help="0 takes the likeliest token each time; 1 draws from the model's probabilities")
    parser.add_argument("--top_p", type=positive_float, default=1.0, help="draw among the likeliest tokens only, which "
                                                                          "have this probability together")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--pipelines", type=counts, metavar="3,2,1",
                        help="of several processes, the decoder layers that each holds (default: by free memory)")
    parser.add_argument("--plan", metavar="PLAN.JSON", help="instead: those of a plan that cluster/plan.py has made")
    parser.add_argument("--backend", choices=["auto", "gloo"], default="auto",
                        help="gloo: machines with and without a GPU together")
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
    if args.chat and args.prompt is None and not over_several():
        require_input()
    if odd := [prompt for prompt in args.prompt or () if not prompt.isprintable()]:
        raise UserError(f"--prompt {odd[0]!r} has characters that can't be printed: leave them out")
    if args.pipelines and args.plan:
        raise UserError("--plan says which process holds which layers: leave out --pipelines")
    if (args.pipelines or args.plan) and not over_several():
        raise UserError("--pipelines and --plan divide the model among several processes: start them with torchrun or "
                        "launch_cluster.sh")
    if args.merge_adapter and over_several():
        raise UserError("--merge_adapter needs the whole model in one process: start it without torchrun")
    return args


def over_several() -> bool:
    """Whether this is one of several processes, which divide the model."""
    return int(os.environ.get("RANK", 0)) >= 0 and int(os.environ.get("WORLD_SIZE", 1)) > 1  # --elastic sets no RANK


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
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # of many classes; a panic of tokenizers' Rust is no Exception
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


def answer(args, model, tokenizer, talk: list[dict[str, str]]) -> str:
    """The prompt, the content of the last message, and what follows it; with --chat the answer to the conversation."""
    import torch

    ids = fit(args, model.config, tokenizer, talk)
    inputs = torch.tensor([ids], device=model.device)
    out = model.generate(input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=args.max_new_tokens,
                         pad_token_id=tokenizer.eos_token_id, **drawing(args))[0]
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
    if over_several():
        from inference.talk import write_together

        return write_together(args)
    model, tokenizer = load(args, *find_model(args))
    import torch

    torch.manual_seed(args.seed)
    if args.merge_adapter:
        merge(model, tokenizer, args.merge_adapter)
    for k, prompt in enumerate(args.prompt or ()):
        torch.manual_seed(args.seed + k)
        print(answer(args, model, tokenizer, [{"role": "user", "content": prompt}]), flush=True)
    if args.chat and args.prompt is None:
        print(ASKS, flush=True)
        talk = []
        for line in filter(str.strip, sys.stdin):
            talk.append({"role": "user", "content": line.strip()})
            said = answer(args, model, tokenizer, talk)
            talk.append({"role": "assistant", "content": said})
            print(said, flush=True)


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --device cpu, or a smaller model"):
        main()
