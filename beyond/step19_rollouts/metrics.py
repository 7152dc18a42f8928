"""What a run records: runs/<run_name>/config.json, metrics.jsonl and, with --use_wandb, Weights & Biases (W&B).

All ranks run the same program, so without care each of them would print and write the same lines. Here every rank makes
a RunLogger, but only that of the logging rank writes. The others do nothing, so the training loop need not ask.
"""

import fcntl
import itertools
import json
import math
import os
import re

import torch
import torch.distributed as dist

from utils import UserError, peak_memory_gb, to_readable_format, writing

# TFLOP/s of dense matmuls in bfloat16, by NVIDIA's data sheets, for GPUs with all of these words in their names. Parts
# of a GPU (MIG) and laptops' have less.
PEAK_TFLOPS = {"MIG": None, "Laptop": None, "A100": 312, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989,
               "GH200": 989, "B200": 2250, "A10": 125, "L4": 121, "L40S": 362, "A6000": 155, "3090": 71, "4090": 165}


class RunLogger:
    """Writes one JSON object per optimizer step into `<log_dir>/<run_name>/metrics.jsonl`, and prints one line.

    `loss` is recorded in full precision. `memory_gb` is the largest peak of a rank, as of the steps 1, 2, 10, 20, ...
    `step_seconds` is by the logging rank's clock; what others need beyond that, it waits for in the next step.
    The folder of an older run of that name is renamed to <run_name>.1 (or .2, ...). Raises UserError for a `run_name`
    that is no folder name, and for a run that is still in progress.
    """

    def __init__(self, args, grid, num_steps: int, tokens_per_step: int):
        self.enabled, self.group = grid.is_logging_rank, grid.grid_group
        self.world_size, self.num_steps, self.tokens_per_step = grid.world_size, num_steps, tokens_per_step
        if os.path.basename(args.run_name) != args.run_name or args.run_name in ("", ".", ".."):
            raise UserError(f"--run_name {args.run_name!r} becomes a directory's name: use one without slashes")
        if not self.enabled:
            return
        folder = os.path.join(args.log_dir, args.run_name)
        self.metrics = open_metrics(folder)
        config = {**vars(args), "topology": grid.topology}
        with writing(path := os.path.join(folder, "config.json")), open(path, "w") as file:
            json.dump(config, file, indent=2)
        with writing(folder):
            self.wandb = start_wandb(f"{args.run_name}_{grid}", config, folder) if args.use_wandb else None

    def log(self, step: int, loss: float, grad_norm: float, learning_rate: float, seconds: float, **more) -> None:
        """Records optimizer step `step`, counted from 1. All ranks call it. Raises UserError for NaN, a full disk."""
        if step < 3 or step % 10 == 0:  # not in each step: it costs time
            self.memory = torch.tensor(peak_memory_gb(), device="cuda" if dist.get_backend() == "nccl" else "cpu")
            dist.all_reduce(self.memory, dist.ReduceOp.MAX, self.group)  # some ranks hold more
        if not self.enabled:
            return
        if not math.isfinite(loss + grad_norm + sum(more.values())):
            raise UserError(f"diverged: step {step} has loss {loss}, gradient norm {grad_norm}"
                            f"{f', {more}' if more else ''}: lower --learning_rate")
        row = {"step": step, "loss": loss, "grad_norm": grad_norm, "learning_rate": learning_rate,
               "trained_tokens": step * self.tokens_per_step, "tokens_per_second": self.tokens_per_step / seconds,
               "tokens_per_second_per_rank": self.tokens_per_step / seconds / self.world_size,
               "memory_gb": self.memory.item(), "step_seconds": seconds, **more}
        with writing(self.metrics.name):  # a run whose records are lost is not worth its time: it ends
            self.metrics.write(json.dumps(row) + "\n")
        if self.wandb:
            self.wandb.log(row, step=step)
        tokens, speed, per_rank = (to_readable_format(row[name]) for name in (
            "trained_tokens", "tokens_per_second", "tokens_per_second_per_rank"))
        print(f"step {step}/{self.num_steps} | loss {loss:.4f} | grad norm {grad_norm:.3f} | "
              f"{tokens} tokens | {speed} tokens/s | {per_rank} per rank | {row['memory_gb']:.2f} GB",
              *(f"| {name.replace('_', ' ')} {value:.4f}" for name, value in more.items()), flush=True)

    def close(self) -> None:
        if not self.enabled:
            return
        if self.wandb:
            self.wandb.finish()
        self.metrics.close()
        print(f"metrics: {self.metrics.name}", flush=True)


def flops_per_token(config, seq_len: int) -> int:
    """Floating-point operations of forward and backward for one token: 6 for each weight that multiplies it, and 12 T
    for each channel of the queries of a layer (PaLM, Chowdhery et al. 2022, appendix B).

    Scores above the diagonal are counted, and what is computed again in backward is not.
    """
    heads = config.num_attention_heads * config.head_dim
    attention = 2 * config.hidden_size * (heads + config.num_key_value_heads * config.head_dim)
    mlp = 3 * config.hidden_size * config.intermediate_size
    weights = config.num_hidden_layers * (attention + mlp) + config.vocab_size * config.hidden_size
    return 6 * weights + 12 * config.num_hidden_layers * heads * seq_len


def seconds_at_peak(args, config, device: torch.device, dtype: torch.dtype, tokens: float) -> float | None:
    """How long a rank computes its share `tokens` of a step at the peak of its device; None where that is not known."""
    peak = args.peak_tflops
    if peak is None and device.type == "cuda" and dtype == torch.bfloat16:
        words = set(re.split("[ -]", torch.cuda.get_device_name(device)))
        peak = next((peak for name, peak in PEAK_TFLOPS.items() if set(name.split()) <= words), None)
    return peak and flops_per_token(config, args.seq_len) * tokens / (peak * 1e12)


def open_metrics(folder: str):
    """Opens metrics.jsonl in `folder`, and locks it until it is closed. The folder of an older run is renamed."""
    try:
        os.makedirs(folder, exist_ok=True)
        file = open(os.path.join(folder, "metrics.jsonl"), "a", buffering=1)  # each line is written at once
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails where another run holds the lock
    except OSError as error:
        raise UserError(f"can't write to {folder}, or a run in progress writes there ({error.strerror}): "
                        "choose another --run_name or --log_dir") from None
    if file.tell() == 0:
        return file
    older = next(name for i in itertools.count(1) if not os.path.exists(name := f"{folder}.{i}"))
    os.rename(folder, older)
    print(f"an older run has the same name: its folder is now {older}", flush=True)
    return open_metrics(folder)


def start_wandb(name: str, config: dict, folder: str):
    """A W&B run: online where a login exists, else offline. WANDB_MODE overrides both. It never prompts."""
    import wandb

    try:
        mode = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
    except Exception:  # wandb raises errors of many classes for a missing or refused key
        mode = "offline"
    try:
        return wandb.init(project=config["wandb_project"], group=config["wandb_group"], name=name, config=config,
                          dir=folder, mode=mode, settings=wandb.Settings(init_timeout=20))
    except wandb.errors.CommError as error:
        raise UserError(f"W&B can't be reached ({error}): set WANDB_MODE=offline, and `wandb sync` uploads it later")
