"""Which models can be fine-tuned with LoRA on which cards: computed by the planner, for machines that are not here.

    python tools/what_fits.py
    python tools/what_fits.py --model llama-2-7b --cards 16+12+8 --seq_len 2048

One layer, the embedding and the head of each model are made, with random weights, and their memory is measured on the
CPU as cluster/plan.py does it. The planner then looks for pipelines over cards of so many GB that are equally fast. It
takes 90 % of a card less what CUDA and its libraries occupy. No such card has to be here, and none was.
"""

import argparse
import sys

import torch
from launch import ROOT, Help

sys.path.insert(0, str(ROOT / "cluster"))
import course  # noqa: E402, F401  before step 9's modules

from planning.family_clock import FamilyClock  # noqa: E402
from planning.machines import Cluster, model_facts  # noqa: E402
from planning.pipeline_simulation import Setting  # noqa: E402
from planning.planner import find_plans  # noqa: E402
from training.lora import ALL, Lora  # noqa: E402
from utils import UserError  # noqa: E402

SHAPES = {  # hidden, MLP, layers, heads, key/value heads, vocabulary, tied: from each model's config.json on the Hub
    "llama-3.2-1b": (2048, 8192, 16, 32, 8, 128256, True),
    "llama-2-7b": (4096, 11008, 32, 32, 32, 32000, False),
    "llama-3.1-8b": (4096, 14336, 32, 32, 8, 128256, False),
    "llama-2-13b": (5120, 13824, 40, 40, 40, 32000, False),
}
CARDS = ("8", "12", "16", "24", "16+12+8", "24+24")
CUDA = 0.8  # GB that a process takes of a card before it has a model
RECOMPUTE = {False: "yes", True: "with --recompute"}


def measure(name: str, seq_len: int, rank: int) -> dict:
    """The content of cluster.json for the model, with no machines yet."""
    from transformers import LlamaConfig, LlamaForCausalLM

    hidden, mlp, layers, heads, kv_heads, vocabulary, tied = SHAPES[name]
    config = LlamaConfig(hidden_size=hidden, intermediate_size=mlp, num_hidden_layers=layers, vocab_size=vocabulary,
                         num_attention_heads=heads, num_key_value_heads=kv_heads, tie_word_embeddings=tied,
                         max_position_embeddings=max(4096, seq_len))
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    flags = argparse.Namespace(lora_rank=rank, lora_alpha=2 * rank, lora_dropout=0.0, lora_targets=ALL, seed=0,
                               model_name=name)
    clock = FamilyClock(model, seq_len, torch.bfloat16, torch.device("cpu"), Lora(flags, model, torch.bfloat16))
    clock.known = clock.measure_memory(float("inf"))
    found = {part: clock.measure_part(part, [], 1.0, float("inf")) for part in clock.parts}
    modules = [{"name": name, **cost.facts} for name, cost in zip(clock.names, clock.modules_of(found))]
    return {"model_name": name, "model": model_facts(config), "seq_len": seq_len, "dtype": "bfloat16",
            **clock.extras(), "flags": {}, "modules": modules}


def machines(cards: list[float], num_modules: int) -> dict:
    """Fields of cluster.json for equally fast cards of so many GB, on links of 1 Gbit/s."""
    seconds = {"1": [0.01] * num_modules}
    each = [{"free_memory": (card - CUDA) * 1e9, "optimizer_seconds": 1e-10, "forward": seconds, "backward": seconds}
            for card in cards]
    links = [[None if i == j else {"latency": 1e-4, "bandwidth": 1.25e8} for j in range(len(cards))]
             for i in range(len(cards))]
    return {"hosts": [f"{card:g} GB" for card in cards], "machines": each, "links": links}


def answer(data: dict, cards: str) -> str:
    """Whether micro-batches of one sample can be trained on these cards, and what each card holds."""
    sizes = [float(card) for card in cards.split("+")]
    cluster = Cluster({**data, **machines(sizes, len(data["modules"]))})
    for recompute, word in RECOMPUTE.items():
        try:
            best = find_plans(cluster, 4 * len(sizes), Setting(recompute=recompute), [1]).best[0]
        except UserError:
            continue
        peaks = best.result.peak_memory
        if len(sizes) == 1:
            return f"{word}: {peaks[0] / 1e9:.1f} GB"
        places = [f"{layers} layers, {peaks[rank] / 1e9:.1f} GB on the card of {sizes[rank]:g}"
                  for pipeline in best.candidate.pipelines for rank, layers in zip(pipeline.machines, pipeline.layers)]
        return f"{word}: " + "; ".join(places)
    return "no"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--model", nargs="*", choices=SHAPES, default=list(SHAPES), help="to look at")
    parser.add_argument("--cards", nargs="*", default=CARDS, metavar="16+12+8", help="GB of each card")
    parser.add_argument("--seq_len", type=int, default=1024, help="tokens of a sample")
    parser.add_argument("--lora_rank", type=int, default=16, help="of the adapters")
    args = parser.parse_args()
    for name in args.model:
        data = measure(name, args.seq_len, args.lora_rank)
        print(f"{name}, rank {args.lora_rank}, micro-batches of one sample of {args.seq_len} tokens", flush=True)
        for cards in args.cards:
            print(f"    {cards:>8} GB  {answer(data, cards)}", flush=True)


if __name__ == "__main__":
    main()
