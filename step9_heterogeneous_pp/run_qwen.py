"""Qwen3 on two pipelines of one stage, each stage over two tensor-parallel ranks.

    torchrun --standalone --nproc_per_node 4 run_qwen.py
    torchrun --standalone --nproc_per_node 4 run_qwen.py --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5

Both pipelines have the same template, so their numbers of micro-batches are given one a pipeline.
"""

from heterogeneous_parallel_plugin import HeterogeneousParallelPlugin
from pipeline_template import PipelineTemplate
from run_common import clear_errors, load_model, next_token_loss, next_tokens, parse_args, speeches, train

TOY = dict(vocab_size=1024, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
           num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True)


def main():
    args = parse_args(__doc__)
    plugin = HeterogeneousParallelPlugin(tp_size=2, microbatch_size=args.microbatch_size, precision=args.precision,
                                         device=args.device)
    from transformers import Qwen3ForCausalLM  # here: it takes seconds, and a wrong flag need not wait for it

    model, weights = load_model(Qwen3ForCausalLM, TOY, args)

    # Edit these: layers of each stage, which pipelines there are, how many micro-batches each takes.
    one_stage = PipelineTemplate.from_layers_per_stage(model, [model.config.num_hidden_layers])
    plugin.set_pipelines([one_stage, one_stage], num_microbatches=[5, 3])

    dataset = speeches(plugin, args, model.config.vocab_size)
    train(plugin, model, weights, dataset, next_tokens, next_token_loss, args)


if __name__ == "__main__":
    with clear_errors():
        main()
