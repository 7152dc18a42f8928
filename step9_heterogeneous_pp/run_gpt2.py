"""GPT-2 on one pipeline of two stages and two of one stage.

    torchrun --standalone --nproc_per_node 4 run_gpt2.py
    torchrun --standalone --nproc_per_node 4 run_gpt2.py --model_name_or_path gpt2 --learning_rate 3e-5

The slow pair of machines is one pipeline and takes 2 of a step's 8 micro-batches, the fast ones take 3 each.
"""

from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from pipeline_template import PipelineTemplate
from run_common import clear_errors, load_model, next_token_loss, next_tokens, parse_args, speeches, train

TOY = dict(vocab_size=1024, n_embd=64, n_layer=4, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)


def main():
    args = parse_args(__doc__)
    plugin = HeterogeneousParallelPlugin(microbatch_size=args.microbatch_size, precision=args.precision,
                                         device=args.device)
    from transformers import GPT2LMHeadModel  # here: it takes seconds, and a wrong flag need not wait for it

    model, weights = load_model(GPT2LMHeadModel, TOY, args)

    # Edit these: which modules each stage holds, which pipelines there are, how many micro-batches each takes.
    name, modules = PipelineTemplate.get_model_name(model), PipelineTemplate.get_modules(model)
    half = len(modules) // 2
    two_stages = PipelineTemplate(name, [modules[:half], modules[half:]])
    one_stage = PipelineTemplate(name, [modules])
    plugin.set_pipelines([two_stages, one_stage, one_stage], num_microbatches={two_stages: 2, one_stage: 3})

    dataset = speeches(plugin, args, model.config.vocab_size)
    train(plugin, model, weights, dataset, next_tokens, next_token_loss, args)


if __name__ == "__main__":
    with clear_errors():
        main()
