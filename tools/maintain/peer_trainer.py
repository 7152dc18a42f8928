"""What a user would pick instead for LoRA on one machine: transformers' Trainer with peft.

A minimal script that compare_trainer.py runs beside ours, with its own flags as JSON: same base, same samples in the
same optimizer step, same targets of the adapters, same clipping and fused AdamW, nothing logged or saved by the
Trainer. It prints a line a step, with its loss.
"""

import json
import os
import sys
import types

import numpy as np

for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
    os.environ.pop(name, None)  # else the Trainer would start torch.distributed for its one process

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments


class Samples(torch.utils.data.Dataset):
    """The rows of a file of int32 ids, T + 1 each: inputs (T), and the targets (T) one further on."""

    def __init__(self, path: str, seq_len: int):
        self.rows = np.fromfile(path, dtype=np.int32).reshape(-1, seq_len + 1)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = torch.from_numpy(self.rows[i].astype(np.int64))
        return {"input_ids": row[:-1], "labels": row[:-1], "shift_labels": row[1:]}


class Report(TrainerCallback):
    """Prints each step when it is done."""

    loss = 0.0

    def on_step_end(self, args, state, control, **kwargs):
        print(f"step {state.global_step}/{state.max_steps} | loss {self.loss:.4f}", flush=True)
        self.loss = 0.0


class Noted(Trainer):
    """The Trainer, of which `report` gets each step's loss: the sum of what its micro-batches add to it."""

    report = None

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.report.loss += loss.item()
        return loss


def main() -> None:
    args = types.SimpleNamespace(**json.loads(sys.argv[1]))
    torch.set_num_threads(args.threads)
    torch.manual_seed(42)
    base = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=args.lora_rank, lora_alpha=2 * args.lora_rank,
                                            target_modules=args.lora_targets.split(",")))
    settings = TrainingArguments(
        output_dir=args.out, max_steps=args.steps + 1, per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.gradient_accumulation, learning_rate=args.learning_rate, weight_decay=0.01,
        lr_scheduler_type="constant", max_grad_norm=1.0, optim="adamw_torch_fused", use_cpu=True,
        train_sampling_strategy="sequential", logging_strategy="no", save_strategy="no", report_to="none",
        disable_tqdm=True, remove_unused_columns=False, dataloader_pin_memory=False)
    report = Report()
    trainer = Noted(model=model, args=settings, train_dataset=Samples(args.tokens, args.seq_len), callbacks=[report])
    trainer.report = report
    trainer.train()


if __name__ == "__main__":
    main()
