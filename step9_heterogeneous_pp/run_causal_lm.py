"""Any causal language model of transformers that says how it can be cut, on text, with the flags of train.py.

    torchrun --nproc_per_node 3 run_causal_lm.py --model_name_or_path Qwen/Qwen3-0.6B --learning_rate 1e-5 \\
        --pipelines "28;18,10" --num_microbatches "6,2"
    torchrun --nproc_per_node 2 run_causal_lm.py --model_name_or_path ../assets/tiny_llama --random_weights --tp_size 2
"""

from pipeline_template import newer_than_tried
from run_common import make_hugging_face
from train import Task, main
from utils import UserError, one_clear_error, read_config


def make_causal_lm(args, plugin) -> Task:
    """As make_llama of train.py, of the class that transformers has for the type in config.json."""
    model_type = read_config(args.model_name)["model_type"]
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES  # takes seconds

    if model_type not in CLASSES:
        raise UserError(f"--model_name_or_path {args.model_name!r} is a {model_type}, and transformers has no causal "
                        f"language model of this type: use one that writes text{newer_than_tried('transformers')}")
    return make_hugging_face(args, CLASSES[model_type], {})


if __name__ == "__main__":
    with one_clear_error(out_of_memory="use --recompute, lower --micro_batch_size, or raise --tp_size or --pp_size"):
        main(__doc__, make_causal_lm, reads_weights=True)
