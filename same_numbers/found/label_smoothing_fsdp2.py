"""transformers' Trainer: with label smoothing over FSDP2, the labels of a causal model are not shifted.

`fully_shard` gives the model's class another name; Trainer looks its name up to decide whether labels are shifted.
python same_numbers/found/label_smoothing_fsdp2.py (exit code 0: the fault is there; 3: gone; 2: it can't be tried)"""
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F

try:
    import accelerate  # noqa: F401  Trainer needs it
    import transformers
    from torch.distributed.fsdp import fully_shard
except ImportError as error:
    print(f"needs transformers, accelerate and torch 2.6: {error}")
    sys.exit(2)

if __name__ == "__main__":
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)).double()
    trainer = transformers.Trainer(model, transformers.TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, report_to="none", label_smoothing_factor=1e-6))
    ids = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    plain = float(trainer.compute_loss(model, {"input_ids": ids, "labels": ids}))
    logits = model(input_ids=ids).logits
    shifted, unshifted = float(F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())), float(
        F.cross_entropy(logits.flatten(0, 1), ids.flatten()))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fully_shard(model)
    sharded = float(trainer.compute_loss(model, {"input_ids": ids, "labels": ids}))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}: loss {plain:.4f}, {sharded:.4f} as "
          f"{type(model).__name__}; by hand {shifted:.4f} with shifted labels, {unshifted:.4f} with unshifted ones")
    is_there = abs(sharded - shifted) > 1e-3
    print("" if is_there else f"mended in {transformers.__version__}", end="")
    sys.exit(0 if is_there else 3)
