"""transformers, tp_plan="auto": what plans leave out between divided layers keeps its own rank's part of the gradient.
python same_numbers/found/tp_missing_rules.py (exit code 0: the fault is there; 3: it is gone; 2: it can't be tried)"""
import os
import sys
import tempfile

import torch
import torch.distributed as dist

try:
    import transformers.distributed.tensor_parallel
except ImportError as error:
    sys.exit(print(f"needs transformers with transformers.distributed: {error}") or 2)
SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
             num_key_value_heads=4, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
KINDS = {"qwen3": {}, "apertus": {}, "phi": dict(qk_layernorm=True), "glm4_moe": dict(
    use_qk_norm=True, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1)}


def go(rank, folder):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    auto, ids = transformers.AutoModelForCausalLM, torch.arange(24).view(2, 12) + 3
    for kind, more in KINDS.items():
        torch.manual_seed(0)
        auto.from_config(transformers.AutoConfig.for_model(kind, **SIZES, **more)).save_pretrained(f"{folder}/{kind}")
        dist.barrier()  # rank 0 has saved it
        one, many = (auto.from_pretrained(f"{folder}/{kind}", dtype=torch.float64, tp_plan=p) for p in (None, "auto"))
        [model(input_ids=ids, labels=ids).loss.backward() for model in (one, many)]
        for (name, p), q in zip(one.named_parameters(), many.parameters()):
            dist.all_reduce(total := (own := getattr(q.grad, "full_tensor", lambda: q.grad)()).clone())
            off, of_sum = (float((each - p.grad).norm() / p.grad.norm()) for each in (own, total))
            if off > 1e-6:
                print(f"{kind}, rank {rank}: {name} off by {off:.2g}, its sum over ranks by {of_sum:.1g}", flush=True)
                open(f"{folder}/wrong", "w").close()


if __name__ == "__main__":
    torch.multiprocessing.spawn(go, (folder := tempfile.mkdtemp(),), nprocs=2)
    sys.exit(0 if os.path.exists(f"{folder}/wrong") else print("mended in transformers", transformers.__version__) or 3)
