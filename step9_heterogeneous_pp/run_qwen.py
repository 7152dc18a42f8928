"""Qwen3 on two pipelines of one stage, each stage over two tensor-parallel ranks.

    torchrun --standalone --nproc_per_node 4 run_qwen.py
    torchrun --standalone --nproc_per_node 4 run_qwen.py --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5
"""

from pipeline_template import PipelineTemplate
from run_common import run

TOY = dict(vocab_size=1024, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
           num_key_value_heads=2, head_dim=32, max_position_embeddings=128, tie_word_embeddings=True)


def pipelines(model):
    """Edit these: the layers of each stage, the pipelines, and how many micro-batches each of them takes."""
    one_stage = PipelineTemplate.from_layers_per_stage(model, [model.config.num_hidden_layers])
    return [one_stage, one_stage], [5, 3]  # or one number per pipeline


if __name__ == "__main__":
    run(__doc__, "Qwen3ForCausalLM", TOY, pipelines, tp_size=2)
