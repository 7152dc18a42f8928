"""GPT-2 on one pipeline of two stages and two pipelines of one stage: a training script, written out.

    torchrun --standalone --nproc_per_node 4 run_gpt2.py
    torchrun --standalone --nproc_per_node 4 run_gpt2.py --model_name_or_path gpt2 --learning_rate 3e-5

The slow pair of machines is one pipeline and takes 2 of the 8 micro-batches of a step. The fast ones take 3 each.
"""

import functools

import torch
import torch.distributed as dist

from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from pipeline_parallel import SCHEDULES
from pipeline_template import PipelineTemplate
from run_common import DEFAULTS, make_hugging_face
from train import choose_pipelines, count_steps, parse_args, training_loop
from utils import one_clear_error

TOY = dict(vocab_size=1024, n_embd=64, n_layer=4, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)


def pipelines(model):
    """Edit these: the modules of each stage, the pipelines, and how many micro-batches each of them takes."""
    name, modules = PipelineTemplate.get_model_name(model), PipelineTemplate.get_modules(model)
    half = len(modules) // 2
    two_stages = PipelineTemplate(name, [modules[:half], modules[half:]])
    one_stage = PipelineTemplate(name, [modules])
    return [two_stages, one_stage, one_stage], {two_stages: 2, one_stage: 3}


def main():
    args = parse_args(__doc__, **DEFAULTS)
    plugin = HeterogeneousParallelPlugin(
        tp_size=args.tp_size, microbatch_size=args.micro_batch_size, precision=args.dtype, device=args.device,
        schedule=SCHEDULES[args.pp_engine], recompute=args.recompute, timeout=args.timeout)
    task = make_hugging_face(args, "GPT2LMHeadModel", TOY)  # the model, its weights, its loss, and text
    templates, num_microbatches = choose_pipelines(args, task.model, pipelines)  # those above, unless flags give others
    plugin.set_pipelines(pipelines=templates, num_microbatches=num_microbatches)

    num_steps = count_steps(args, plugin.global_batch_size)
    samples, collate = task.data(args, task.model.config, num_steps * plugin.global_batch_size)
    dataloader = plugin.prepare_dataloader(samples, seed=args.seed, collate_fn=collate, num_workers=args.num_workers)
    adamw = functools.partial(torch.optim.AdamW, lr=args.learning_rate, fused=True)
    model, optimizer, dataloader = plugin.configure(task.model, adamw, dataloader, task.weights, args.seed)
    training_loop(args, plugin, model, optimizer, dataloader, task.criterion, num_steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, or lower --micro_batch_size"):
        main()
