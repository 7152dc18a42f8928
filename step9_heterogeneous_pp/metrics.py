"""What a run leaves behind and shows meanwhile: runs/<run_name>/config.json, metrics.jsonl, W&B, a bar or lines.

Exactly one rank writes. The others hold a logger too, which does nothing: the training loop need not ask.
"""

import json
import math
import os
import resource
import shutil
import sys

import torch

from utils import to_readable_format


class RunLogger:
    """One JSON object a step into `<log_dir>/<run_name>/metrics.jsonl`; a rerun under the same name starts anew.

    `loss` is the global mean in full precision, `memory_gb` this process's peak (GPU memory on CUDA, else resident).
    """

    def __init__(self, args, grid, num_steps: int, tokens_per_step: int):
        self.enabled = grid.is_logging_rank
        self.world_size, self.num_steps, self.tokens_per_step = grid.world_size, num_steps, tokens_per_step
        if os.path.basename(args.run_name) != args.run_name or args.run_name in ("", ".", ".."):
            raise ValueError(f"--run_name {args.run_name!r} becomes a directory's name: use one without slashes")
        if not self.enabled:
            return
        self.folder = os.path.join(args.log_dir, args.run_name)
        if os.path.exists(os.path.join(self.folder, "metrics.jsonl")):  # a run of ours, not just any folder
            shutil.rmtree(self.folder)
        os.makedirs(self.folder, exist_ok=True)
        stages = [len(pipeline) for pipeline in grid.pipelines]
        sizes = {"dp_size": grid.dp_world_size, "stages_per_pipeline": stages, "tp_size": grid.tp_world_size}
        config = {**vars(args), "topology": {**sizes, "world_size": grid.world_size}}
        with open(os.path.join(self.folder, "config.json"), "w") as file:
            json.dump(config, file, indent=2)
        self.metrics = open(os.path.join(self.folder, "metrics.jsonl"), "w", buffering=1)  # writes line by line
        self.wandb = start_wandb(f"{args.run_name}_{grid}", config, self.folder) if args.use_wandb else None
        self.bar = None
        if sys.stdout.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=num_steps, unit="step", file=sys.stdout, dynamic_ncols=True)

    def log(self, step: int, loss: float, seconds: float) -> None:
        """Records optimizer step `step` (from 1 on). Raises ValueError where the loss is no number any more."""
        if not self.enabled:
            return
        if not math.isfinite(loss):
            raise ValueError(f"the loss of step {step} is {loss}: the run has diverged, lower --learning_rate")
        row = {"step": step, "loss": loss, "trained_tokens": step * self.tokens_per_step,
               "tokens_per_second": self.tokens_per_step / seconds,
               "tokens_per_second_per_rank": self.tokens_per_step / seconds / self.world_size,
               "memory_gb": peak_memory_gb(), "step_seconds": seconds}
        self.metrics.write(json.dumps(row) + "\n")
        if self.wandb:
            self.wandb.log(row, step=step)
        speed = f"{to_readable_format(row['tokens_per_second'])} tokens/s"
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {speed}", refresh=False)
            self.bar.update()
        else:
            tokens, per_rank = (to_readable_format(row[k]) for k in ("trained_tokens", "tokens_per_second_per_rank"))
            print(f"step {step}/{self.num_steps} | loss {loss:.4f} | {tokens} tokens | {speed} | {per_rank} a rank | "
                  f"{row['memory_gb']:.2f} GB", flush=True)

    def close(self) -> None:
        if not self.enabled:
            return
        if self.bar is not None:
            self.bar.close()
        if self.wandb:
            self.wandb.finish()
        self.metrics.close()
        print(f"metrics: {self.metrics.name}", flush=True)


def start_wandb(name: str, config: dict, folder: str):
    """A W&B run: online where a login exists, offline otherwise; WANDB_MODE has the last word. Never asks."""
    import wandb

    mode = os.environ.get("WANDB_MODE")
    if mode is None:
        try:
            mode = "online" if wandb.login(prompt=False) else "offline"
        except Exception:  # wandb raises errors of many kinds for a missing or refused key
            mode = "offline"
    options = dict(project="picotron_tutorial", name=name, config=config, dir=folder)
    try:
        return wandb.init(mode=mode, settings=wandb.Settings(init_timeout=20), **options)
    except wandb.errors.CommError as error:
        print(f"W&B can't be reached ({error}): this run stays offline, `wandb sync` sends it later", flush=True)
        return wandb.init(mode="offline", **options)


def peak_memory_gb() -> float:
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1e9 if sys.platform == "darwin" else peak * 1024 / 1e9  # macOS counts bytes, Linux KiB
