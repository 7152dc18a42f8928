"""GPT-2 on one pipeline of two stages and two pipelines of one stage, with templates that list modules.

    torchrun --standalone --nproc_per_node 4 run_gpt2.py
    torchrun --standalone --nproc_per_node 4 run_gpt2.py --model_name_or_path gpt2 --learning_rate 3e-5

The slow pair of machines is one pipeline and takes 2 of the 8 micro-batches of a step. The fast ones take 3 each. On
twice as many processes there is twice as much of all, as in `torchrun --nnodes 2 --nproc_per_node 4 ... run_gpt2.py`.
"""

import functools

import torch.distributed as dist

from pipeline_template import PipelineTemplate
from run_common import make_hugging_face
from train import main
from utils import one_clear_error

TOY = dict(vocab_size=1024, n_embd=64, n_layer=4, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)


def pipelines(model, args):
    """Edit these: the modules of each stage, the pipelines, and how many micro-batches each of them takes."""
    name, modules = PipelineTemplate.get_model_name(model), PipelineTemplate.get_modules(model)
    half = len(modules) // 2
    two_stages = PipelineTemplate(name, [modules[:half], modules[half:]])
    one_stage = PipelineTemplate(name, [modules])
    copies = max(1, dist.get_world_size() // (4 * args.tp_size))
    return [two_stages, one_stage, one_stage] * copies, {two_stages: 2, one_stage: 3}


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, or lower --micro_batch_size"):
        main(__doc__, lambda args, _plugin: make_hugging_face(
                 args, "GPT2LMHeadModel", TOY, functools.partial(pipelines, args=args)),
             reads_weights=True, model_name=None, seq_len=64, max_tokens=40960)
