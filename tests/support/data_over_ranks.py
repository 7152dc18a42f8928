"""Answers of unlike lengths through unlike pipelines: `data_over_ranks.py OUT CASE`, on as many ranks as CASE needs.

CASE is JSON: `family` ("ours", or a model type of transformers), `layers` of each pipeline's stages, `micro_batches` of
each, `tp_size`, and what differs from FLAGS. Each rank writes OUT/<rank>.pt: the losses of two steps and the gradients
of what it holds after each; the loss of the evaluation, how many of its micro-batches were this rank's, and whether it
left generators and mode alone.
"""

import argparse
import json
import pathlib
import sys

import torch
import torch.distributed as dist

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "cluster"))

import course  # noqa: E402, F401  before step 9's modules

import process_group_manager as pgm  # noqa: E402
from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin  # noqa: E402
from model import Llama, init_weights  # noqa: E402
from pipeline_template import PipelineTemplate  # noqa: E402
from run_common import mean_cross_entropy  # noqa: E402
from tensor_parallel import cross_entropy, split_over_tp  # noqa: E402
from data import encoded  # noqa: E402
from data.load import load_data  # noqa: E402
from training.evaluation import Evaluator  # noqa: E402
from utils import TINY_LLAMA, load_config  # noqa: E402

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
             head_dim=8)
MIXTRAL = dict(vocab_size=1024, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
               num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.1)
FLAGS = dict(seq_len=24, seed=3, packing="auto", validation_split=0.25, data_from_rank0=False)
STEPS = 2


def make_model(family: str) -> tuple[torch.nn.Module, object, object]:
    """The model, the weights for configure(), and the mean loss of a micro-batch."""
    if family == "ours":
        config = load_config(TINY_LLAMA, **SIZES)
        with torch.device("meta"):
            model = Llama(config, torch.float64)
        return (model, lambda stage: init_weights(stage.model, 0, torch.device("cpu"), split_over_tp),
                lambda logits, batch: cross_entropy(logits, batch["target_ids"], config.vocab_size))
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**MIXTRAL)
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = MixtralForCausalLM(config).double()
    return model, None, lambda output, batch: mean_cross_entropy(output, batch, config.router_aux_loss_coef)


def main() -> None:
    out, case = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
    args = argparse.Namespace(**{**FLAGS, **case})
    pgm.init_process_group("gloo")
    encoded.CACHE = str(out / "cache")
    model, weights, criterion = make_model(case["family"])
    plugin = HeterogeneousParallelPlugin(case["tp_size"], 2, "float64", "cpu")
    templates = [PipelineTemplate.from_layers_per_stage(model, layers) for layers in case["layers"]]
    plugin.set_pipelines(templates, case["micro_batches"])
    data = load_data(args, args.tokenizer, 1024, plugin.global_batch_size)
    data.train.set_steps(STEPS)
    loader = plugin.prepare_dataloader(data.train, collate_fn=data.collate)
    model, optimizer, _ = plugin.configure(model, lambda params: torch.optim.SGD([p for _, p in params]), None, weights)
    evaluator = Evaluator(plugin, model, data.evaluation, data.collate_evaluation, criterion, case.get("num_batches"))
    batches, results, state = iter(loader), [], torch.get_rng_state()
    evaluated = evaluator.evaluate()
    untouched = model.training and torch.equal(state, torch.get_rng_state())
    for _ in range(STEPS):
        loss = plugin.execute_pipeline(batches, model, data.weighted(criterion), optimizer)
        gradients = {name: param.grad.clone() for name, param in model.module.model.named_parameters()}
        results.append((loss.item(), gradients))
    found = {"steps": results, "evaluated": evaluated, "untouched": untouched, "own": len(evaluator.mine)}
    torch.save(found, out / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
