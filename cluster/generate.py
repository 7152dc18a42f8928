"""Text from a checkpoint, an adapter, or any causal model in Hugging Face's layout.

    python cluster/generate.py --checkpoint checkpoints/train_distributed --prompt "The state of the union is"
    python cluster/generate.py --adapter checkpoints/my_run --chat
    torchrun --nproc_per_node 3 cluster/generate.py --checkpoint models/large --pipelines "3,2,1" --prompt "Once upon"

A path is a run's folder, whose newest checkpoint is taken, or one of its checkpoints. With --adapter the frozen weights
are those that it was trained beside, or those of --checkpoint. --chat puts what one writes into the tokenizer's chat
template, and without --prompt asks for one line after another, each an answer to what was said before. One process
loads any causal model of transformers whole, Mamba and others without attention too, and writes by its own generate().
Several divide a model that step 9 can divide, which none of them need be able to hold: see inference/.
"""

from ranks import course  # noqa: F401  before step 9's modules

import argparse
import os

from inference.talk import generate_all
from ranks.errors import one_error_of_all
from run.flags import check_text, seed
from train import counts
from utils import ArgumentParser, UserError, number, positive_float, positive_int

temperature = number(float, lambda value: value == 0 or value >= 0.01, "0, or 0.01 or more")


def parse_args() -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", help="a directory with config.json, safetensors and a tokenizer, or a Hub id")
    parser.add_argument("--adapter", help="a directory with adapter_config.json and adapter_model.safetensors")
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
    parser.add_argument("--backend", choices=["auto", "gloo"], default="auto",
                        help="gloo: machines with and without a GPU together")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
                        help="of the weights (default: as stored; bfloat16 ones in float32 on a GPU without it)")
    args = parser.parse_args()
    if not args.checkpoint and not args.adapter:
        raise UserError("name a model: --checkpoint, or --adapter")
    if args.prompt is None and not args.chat:
        raise UserError("write a --prompt, or use --chat")
    for prompt in args.prompt or ():
        check_text("--prompt", prompt)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        args.backend = "gloo"  # NCCL would take memory of the GPU, for nothing
        if args.pipelines:
            raise UserError("--pipelines divides the model among several processes: start them with torchrun or "
                            "launch_cluster.sh")
    return args


def main():
    generate_all(parse_args())


if __name__ == "__main__":
    with one_error_of_all(out_of_memory="use --device cpu, or a smaller model"):
        main()
