"""Llama on a pipeline of three unlike stages, beside a single machine that holds all of it.

    torchrun --standalone --nproc_per_node 4 run_llama.py
    torchrun --standalone --nproc_per_node 4 run_llama.py --model_name_or_path TinyLlama/TinyLlama_v1.1
"""

from pipeline_template import PipelineTemplate
from run_common import run

TOY = dict(vocab_size=1024, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
           num_key_value_heads=2, max_position_embeddings=128)


def pipelines(model):
    """Edit these: the layers of each stage, the pipelines, and how many micro-batches each of them takes."""
    layers = model.config.num_hidden_layers
    sizes = [layers // 2, layers // 4, layers - layers // 2 - layers // 4]
    three_stages = PipelineTemplate.from_layers_per_stage(model, sizes)
    one_stage = PipelineTemplate.from_layers_per_stage(model, [layers])
    return [three_stages, one_stage], {three_stages: 5, one_stage: 3}


if __name__ == "__main__":
    run(__doc__, "LlamaForCausalLM", TOY, pipelines)
