"""Llama on a pipeline of three unlike stages, beside a single machine that holds all of it.

    torchrun --standalone --nproc_per_node 4 run_llama.py
    torchrun --standalone --nproc_per_node 4 run_llama.py --model_name_or_path TinyLlama/TinyLlama_v1.1
"""

from pipeline_template import PipelineTemplate
from run_common import load_model, make_plugin, parse_args, train_on_speeches
from utils import one_clear_error

TOY = dict(vocab_size=1024, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4,
           num_key_value_heads=2, max_position_embeddings=128)


def main():
    args = parse_args(__doc__)
    plugin = make_plugin(args)
    model, weights = load_model("LlamaForCausalLM", TOY, args)

    # Edit these: the layers of each stage, the pipelines, and how many micro-batches each of them takes.
    layers = model.config.num_hidden_layers
    sizes = [layers // 2, layers // 4, layers - layers // 2 - layers // 4]
    three_stages = PipelineTemplate.from_layers_per_stage(model, sizes)
    one_stage = PipelineTemplate.from_layers_per_stage(model, [layers])
    plugin.set_pipelines([three_stages, one_stage], num_microbatches={three_stages: 5, one_stage: 3})

    train_on_speeches(plugin, model, weights, args)


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, or lower --microbatch_size"):
        main()
