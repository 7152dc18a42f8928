"""transformers, tp_plan="auto": what plans leave out between divided layers keeps its own rank's part of the gradient.

python same_numbers/found/tp_missing_rules.py (exit code 0: the fault is there; 3: it is gone; 2: it can't be tried)"""
import os
import pathlib
import sys
import tempfile

import torch
import torch.distributed as dist

try:
    import transformers
    import transformers.distributed.tensor_parallel
except ImportError as error:
    print(f"needs transformers with transformers.distributed: {error}")
    sys.exit(2)
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=4, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
KINDS = {"qwen3": {}, "apertus": {}, "phi": dict(qk_layernorm=True), "glm4_moe": dict(
    use_qk_norm=True, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1)}


def go(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    ids = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    for kind, more in KINDS.items():
        torch.manual_seed(0)
        path, load = f"{folder}/{kind}", transformers.AutoModelForCausalLM.from_pretrained
        config = transformers.AutoConfig.for_model(kind, **SIZES, **more)
        transformers.AutoModelForCausalLM.from_config(config).double().save_pretrained(path)  # rank 0 does
        dist.barrier()
        one, many = load(path, dtype=torch.float64).eval(), load(path, dtype=torch.float64, tp_plan="auto").eval()
        [model(input_ids=ids, labels=ids).loss.backward() for model in (one, many)]
        for (name, p), q in zip(one.named_parameters(), many.parameters()):
            own = q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad
            off, total = float((own - p.grad).norm() / p.grad.norm()), own.clone()
            dist.all_reduce(total)
            if off > 1e-6:
                print(f"{kind}, rank {rank}: {name} is off by {off:.2g} of its length, the sum over ranks by "
                      f"{float((total - p.grad).norm() / p.grad.norm()):.1g}", file=open(f"{folder}/off{rank}", "a"))


if __name__ == "__main__":
    torch.multiprocessing.spawn(go, (folder := tempfile.mkdtemp(),), nprocs=2)
    wrong = "".join(path.read_text() for path in sorted(pathlib.Path(folder).glob("off*")))
    print(f"transformers {transformers.__version__}:", wrong or f"mended in {transformers.__version__}", sep="\n")
    sys.exit(0 if wrong else 3)
