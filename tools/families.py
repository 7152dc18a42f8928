"""Which causal language models of transformers can be cut into stages and split over tp ranks, with equal numbers?

    python tools/families.py                       a sample; --all: every class of the installed transformers
    python tools/families.py --only 'Qwen|Gemma'   those whose name fits
    python tools/families.py --all --markdown      a table, one line for each kind of result

Each class is built at toy size with random weights in float64, and trained for two steps of two micro-batches with
padding: whole, in stages of one layer and of the others as step 9 cuts it, and split over two ranks. The stages read
their parameters from files in the Hub's format. The router's loss of a mixture of experts is switched on. Two
processes share the work. The verdicts:

    exact      every loss agrees to 1e-9, and every gradient to 1e-9 of its largest number
    refused    step 9 says that it cannot cut or split the model, and why
    unequal    it was cut, and the numbers differ: a fault, which ends the program with exit code 1
    failed     it was cut, and then something raised an error: likewise
    not built  no toy of the class could be made here, so nothing is known
"""

import argparse
import copy
import inspect
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))  # where lab is

from lab.huggingface import float64_throughout, run_backward, run_chain
from lab.launch import Help, environment, modules_of, torchrun

with modules_of(9):
    import process_group_manager as pgm
    from hf_tensor_parallel import apply_tensor_parallel
    from pipeline_stage import PipelineStage
    from pipeline_template import PipelineTemplate, Unsupported
    from run_common import mean_cross_entropy
    from stage_weights import load_weights
    from tensor_parallel import split_parameter

SAMPLE = ("Cohere", "Gemma2", "Glm4", "GPTNeoX", "GptOss", "Granite", "Llama", "Mixtral", "Olmo2", "Phi3", "Qwen3",
          "Qwen3Moe", "SmolLM3")
TOY = dict(  # of every name that a configuration has
    vocab_size=96, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    num_experts=4, num_local_experts=4, n_routed_experts=4, moe_num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, n_shared_experts=1, num_shared_experts=1,
    first_k_dense_replace=1, n_group=1, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=8, v_head_dim=16, sliding_window=8, ffn_hidden_size=96, n_positions=64, n_embd=64, n_layer=4,
    n_head=4, d_model=64, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, linear_head_dim=16, linear_num_heads=4, output_router_logits=True,
    router_aux_loss_coef=0.1, use_qk_norm=True, qk_layernorm=True, rotary_dim=8,
)
FOR_SOME = {  # a field of the configuration -> what else a toy with this field needs
    "kv_lora_rank": dict(num_key_value_heads=4, head_dim=8), "moe_k": dict(moe_k=2),
    "conv_L_cache": dict(layer_types=["conv", "full_attention"] * 2),
    "vocab_size_per_layer_input": dict(vocab_size_per_layer_input=96, hidden_size_per_layer_input=8),
}


def toy_config(model_class):
    fields = vars(model_class.config_class()).keys() | inspect.signature(model_class.config_class).parameters.keys()
    sizes = dict(TOY)
    for field in FOR_SOME.keys() & fields:
        sizes |= FOR_SOME[field]
    config = model_class.config_class(**{name: value for name, value in sizes.items() if name in fields})
    for name in vars(config):
        if re.search("dropout|_drop$|pdrop", name) and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    config._attn_implementation = config._experts_implementation = "eager"  # others cannot compute in float64
    return config


def toy(model_class, config) -> torch.nn.Module:
    """A model of this class with random weights, none of them zero. Raises what step 9 says where it cannot cut it."""
    with torch.device("meta"):
        model = model_class(config)
    PipelineTemplate.get_modules(model)
    size = sum(param.numel() for param in model.parameters())
    assert size < 6e6, f"a toy of {size:.1e} parameters"
    torch.manual_seed(0)
    model = model_class(config).double()
    with torch.no_grad():
        params = dict(model.named_parameters(remove_duplicate=False))
        for name, value in model.state_dict().items():
            if name in params:
                value.normal_(0, 0.1).add_(1 if value.dim() == 1 else 0)
            elif value.is_floating_point():  # a buffer that is saved
                value.add_(torch.rand_like(value), alpha=0.1)
    return model


def batches() -> list[dict[str, torch.Tensor]]:
    """Two micro-batches of three samples of 12 tokens; the last ones of a sample are padding."""
    rng = torch.Generator().manual_seed(1)
    found = []
    for lengths in ((12, 7, 9), (5, 12, 12)):
        mask = (torch.arange(12) < torch.tensor(lengths)[:, None]).long()
        ids = torch.randint(3, 96, (3, 13), generator=rng)
        found.append({"input_ids": ids[:, :-1] * mask, "attention_mask": mask,
                      "target_ids": torch.where(mask.bool(), ids[:, 1:], -100)})
    return found


def loss_of(model, output, batch) -> torch.Tensor:
    return mean_cross_entropy(output, batch, getattr(model.config, "router_aux_loss_coef", 0)) / 2


def train_whole(model) -> list:
    """[(losses, {name: gradient})] of two steps."""
    steps = []
    for _ in range(2):
        losses = []
        for batch in batches():
            inputs = {name: value for name, value in batch.items() if name != "target_ids"}
            loss = loss_of(model, model(**inputs, use_cache=False), batch)
            loss.backward()
            losses.append(loss.item())
        steps.append((losses, update(dict(model.named_parameters()))))
    return steps


def train_stages(model) -> list:
    """The same with the model in two stages, which hand over hidden states and gradients as run_schedule does.

    Each is built on the meta device and reads its parameters from the files that save_pretrained writes.
    """
    template = PipelineTemplate.from_layers_per_stage(model, [1, model.config.num_hidden_layers - 1])
    template.check(model)
    stages = []
    saves = mock.patch.object(type(model), "should_save_on_this_rank", return_value=True, create=True)  # not 0 alone
    with tempfile.TemporaryDirectory() as folder, saves:
        model.save_pretrained(folder)
        for k in range(template.num_stages):
            with torch.device("meta"):
                empty = type(model)(toy_config(type(model))).double()
            stages.append(PipelineStage(empty, template, k))
            load_weights(stages[-1], folder)
    tied, steps = stages[0].tied, []
    for _ in range(2):
        losses = []
        for batch in batches():
            out, wires = run_chain(stages, batch)
            loss = loss_of(model, out, batch)
            losses.append(loss.item())
            run_backward(loss, wires)
        params = {name: param for stage in stages for name, param in stage.model.named_parameters()}
        if tied and tied[1] in params and tied[0] in params:  # the two ends' sum, as sum over the owners
            params[tied[0]].grad = params[tied[1]].grad = params[tied[0]].grad + params[tied[1]].grad
        gradients = update(params)
        steps.append((losses, {name: value for name, value in gradients.items() if not tied or name != tied[1]}))
    return steps


def update(params: dict) -> dict:
    """A step of gradient descent. Returns the gradients, and drops them."""
    gradients = {}
    with torch.no_grad():
        for name, param in params.items():
            gradients[name] = torch.zeros_like(param) if param.grad is None else param.grad
            param -= 0.01 * gradients[name]
            param.grad = None
    return gradients


def verdict(name: str, kind: str) -> tuple[str, str]:
    """Of a class of transformers in stages, or split over the tp group: the verdict, and the largest difference or the
    reason. Of a split model it is about this rank's parts of the gradients."""
    import transformers

    unknown = "not built"
    try:
        model_class = getattr(transformers, name)
        model = toy(model_class, toy_config(model_class))
        expected = train_whole(copy.deepcopy(model))
        gradients = [gradient for _, found in expected for gradient in found.values()]
        assert all(gradient.isfinite().all() for gradient in gradients), "gradients that are not finite"
        unknown = "failed"  # until here, an error is not ours
        found = train_stages(model) if kind == "stages" else train_whole(apply_tensor_parallel(model))
        return compare(model, expected, found)
    except Unsupported as error:
        return "refused", str(error).splitlines()[0]
    except Exception as error:
        return unknown, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def compare(model, expected: list, found: list) -> tuple[str, str]:
    worst = 0.0
    for (losses, gradients), (cut_losses, cut_gradients) in zip(expected, found):
        if gradients.keys() != cut_gradients.keys():
            return "unequal", f"parameters {sorted(gradients.keys() ^ cut_gradients.keys())[:3]}"
        differences = [abs(a - b) for a, b in zip(losses, cut_losses)]
        for name, gradient in gradients.items():
            module, _, key = name.rpartition(".")
            part = split_parameter(model.get_submodule(module), key, gradient)
            scale = max(gradient.abs().max().item(), 1e-3)
            differences.append((part - cut_gradients[name]).abs().max().item() / scale)
        if any(difference != difference for difference in differences):
            return "unequal", "not a number"
        worst = max(worst, *differences)
    return ("exact" if worst <= 1e-9 else "unequal"), f"{worst:.1e}"


def verdicts(names: list[str]) -> dict[str, list[tuple[str, str]]]:
    """For each class the verdict in stages, which one of the ranks finds, and over tp, which all of them find."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    pgm.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    results: dict[str, list[tuple[str, str]]] = {}
    for kind in ("stages", "tp"):
        sizes = [1] * ranks if kind == "stages" else [1]
        pgm.setup_process_group_manager(sizes, ranks // len(sizes))
        mine = {}
        exact = [name for name, found in results.items() if found[0][0] == "exact"]
        for name in names[rank::ranks] if kind == "stages" else exact:
            with float64_throughout():
                mine[name] = verdict(name, kind)
            if kind == "stages" or rank == 0:
                print(f"{name:40} {kind:8} {mine[name][0]:10} {mine[name][1][:200]}", flush=True)
        everybody = [None] * ranks
        dist.all_gather_object(everybody, mine)
        for name, found in [item for each in everybody for item in each.items()]:
            if kind == "stages":
                results[name] = [found, ("-", "")]
            elif found[0] in ("unequal", "failed") or results[name][1][0] == "-":  # on any rank
                results[name][1] = found
    return results


def print_table(results: dict[str, list[tuple[str, str]]]) -> None:
    """One line for each kind of result."""
    import transformers

    lines: dict[tuple, list[str]] = {}
    for name, ((stages, detail), (tp, tp_detail)) in sorted(results.items()):
        why = (detail if stages == "refused" else tp_detail) * ("refused" in (stages, tp))
        why = re.sub(r"^.* is not implemented(, since|:)? (it has )?|\. Use tp_size 1.*|, and .*| \(transf.*", "", why)
        shown = why.split(", ")[0] + ", ..." * (", " in why)
        lines.setdefault((stages, tp, shown), []).append(name.removesuffix("ForCausalLM"))
    print(f"transformers {transformers.__version__}\n\n| in stages | tp 2 | why not | classes (... ForCausalLM) |")
    print("| --- | --- | --- | --- |")
    for (stages, tp, why), names in sorted(lines.items(), key=lambda line: (line[0][:2], -len(line[1]))):
        print(f"| {stages} | {tp} | {why} | {len(names)}: {', '.join(names)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--all", action="store_true", help="every class, instead of a sample")
    parser.add_argument("--only", metavar="REGEX", help="those whose name fits")
    parser.add_argument("--markdown", action="store_true", help="print a table at the end")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit(subprocess.run(torchrun(2, __file__, *sys.argv[1:]), env=environment()).returncode)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()))
    if args.only:
        names = [name for name in names if re.search(args.only, name)]
    elif not args.all:
        names = [f"{name}ForCausalLM" for name in SAMPLE]
    results = verdicts(names)
    if dist.get_rank() == 0:
        if args.markdown:
            print_table(results)
        for k, kind in enumerate(("in stages", "tp 2")):
            found = [result[k][0] for result in results.values()]
            print(f"{kind}:", ", ".join(f"{found.count(name)} {name}" for name in sorted(set(found))))
    bad = any(kind in ("unequal", "failed") for result in results.values() for kind, _ in result)
    dist.destroy_process_group()
    sys.exit(bad)


if __name__ == "__main__":
    main()
