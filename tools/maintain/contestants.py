"""The contestants of measure_course.py: our steps and what they are compared with, their start and their results."""

import json
import pathlib
import subprocess
import sys
from typing import NamedTuple

from lab.launch import ROOT, STEPS, metrics
from maintain.turns import Program

TOKENS_A_STEP = 4096
BASELINE = "step 3, one process"


class Run(NamedTuple):
    """One contestant: the number of the step (None: a peer) with its flags, and what its speed is compared with."""

    name: str
    step: int | None
    ranks: int
    flags: str
    against: tuple[tuple[str, float | None], ...] = ()  # (name, ratio to reach)


def micro_batch(size: int, accumulation: int) -> str:
    return f"--micro_batch_size {size} --gradient_accumulation_steps {accumulation}"


def two_stages(count: int, bar: float) -> list[Run]:
    """With so many micro-batches a step."""
    flags, name = micro_batch(32 // count, count) + " --pp_size 2", f"{count} micro-batches"
    theirs, ours = f"torch Schedule1F1B, pp 2, {name}", f"step 8, pp 2, 1F1B, {name}"
    return [
        Run(f"step 10, pp 2, zb, {name}", 10, 2, flags + " --pp_engine zb", ((theirs, bar), (ours, None))),
        Run(ours, 8, 2, flags, ((theirs, None),)),
        Run(theirs, None, 2, f"1f1b --microbatches {count}"),
        Run(f"torch zero bubble, pp 2, {name}", None, 2, f"zb --microbatches {count}"),
    ]


COMPILED = "step 3, --compile"
PP_4, PP_2 = micro_batch(4, 8) + " --pp_size 4", micro_batch(4, 8) + " --pp_size 2"
DP_4 = micro_batch(1, 8) + " --dp_size 4"
INTERLEAVED = " --virtual_stages 2 --pp_engine interleaved"
TP_2, TP_4 = micro_batch(4, 8) + " --tp_size 2", micro_batch(4, 8) + " --tp_size 4"
LONG = micro_batch(1, 1) + " --seq_len 4096"
# Routers that stay as they are, made about even: uneven choices of experts cost time, but differ from run to run.
EXPERTS = " --num_experts 8 --learning_rate 1e-9 --balance_bias 0.01"
GROUPS = {
    "One process": [
        Run(BASELINE, 3, 1, micro_batch(4, 8), (("Hugging Face", 1.0),)),
        Run("Hugging Face", None, 1, "hf"),
    ],
    "Two stages": [*two_stages(4, 1.1), *two_stages(8, 1.05)],
    "Four stages, or twice four": [
        Run("step 10, pp 4, zb", 10, 4, PP_4 + " --pp_engine zb",
            (("torch Schedule1F1B", 1.03), ("torch zero bubble", 1.03), ("torch interleaved zero bubble", 1.03),
             ("torch zero bubble V", 1.03), (BASELINE, 1.77))),
        Run("step 8, pp 4, 1F1B", 8, 4, PP_4, (("torch Schedule1F1B", 1.05), (BASELINE, 1.8))),
        Run("torch Schedule1F1B", None, 4, "1f1b"),
        Run("torch interleaved 1F1B", None, 4, "interleaved-1f1b"),
        Run("torch zero bubble", None, 4, "zb"),
        Run("torch interleaved zero bubble", None, 4, "interleaved-zb"),
        Run("torch zero bubble V", None, 4, "zbv"),
    ],
    "Data parallel": [
        Run("step 6, dp 4", 6, 4, DP_4, (("torch DDP", 1.0), (BASELINE, 1.45))),
        Run("torch DDP", None, 4, "ddp"),
    ],
    "Tensor parallel": [
        Run("step 8, tp 2", 8, 2, TP_2, (("DTensor, tp 2", 1.6), (BASELINE, 1.15))),
        Run("DTensor, tp 2", None, 2, "dtensor"),
        Run("step 8, tp 4", 8, 4, TP_4, (("DTensor, tp 4", 1.8), (BASELINE, None))),
        Run("DTensor, tp 4", None, 4, "dtensor"),
    ],
    "Sequence parallel": [
        Run("step 14, tp 2, sp", 14, 2, TP_2 + " --sequence_parallel",
            (("step 8, tp 2", None),)),
    ],
    "All three": [
        Run("step 8, 2x2x2", 8, 8, micro_batch(2, 8) + " --tp_size 2 --pp_size 2 --dp_size 2", ((BASELINE, 0.95),)),
    ],
    "Compiled": [
        Run(COMPILED, 3, 1, micro_batch(4, 8) + " --compile", (("Hugging Face", 1.1), (BASELINE, None))),
        Run("step 8, pp 4, 1F1B, --compile", 8, 4, PP_4 + " --compile",
            (("step 8, pp 4, 1F1B", None), (COMPILED, None))),
        Run("step 6, dp 4, --compile", 6, 4, DP_4 + " --compile", (("step 6, dp 4", None), (COMPILED, None))),
        Run("step 8, tp 2, --compile", 8, 2, TP_2 + " --compile", (("step 8, tp 2", None), (COMPILED, None))),
    ],
    "Virtual stages": [
        Run("step 11, pp 4, interleaved", 11, 4, PP_4 + INTERLEAVED, (("torch interleaved 1F1B", 1.0),)),
        Run("step 11, pp 4, interleaved_zb", 11, 4, PP_4 + INTERLEAVED + "_zb",
            (("torch interleaved zero bubble", 1.0),)),
    ],
    "Shards": [
        Run("step 12, dp 4, ZeRO 1", 12, 4, DP_4 + " --zero 1", (("step 6, dp 4", 0.97),)),
        Run("step 12, dp 4, ZeRO 2", 12, 4, DP_4 + " --zero 2", (("torch fully_shard, weights kept", 1.0),)),
        Run("torch fully_shard, weights kept", None, 4, "zero2"),
        Run("step 13, dp 4, FSDP", 13, 4, DP_4 + " --zero 3", (("torch fully_shard", 1.0),)),
        Run("torch fully_shard", None, 4, "fsdp"),
    ],
    "Context parallel": [
        Run("step 15, one process", 15, 1, LONG),
        Run("step 15, cp 2, zigzag", 15, 2, LONG + " --cp_size 2", (("step 15, one process", None),)),
        Run("step 15, cp 2, contiguous", 15, 2, LONG + " --cp_size 2 --cp_layout contiguous",
            (("step 15, one process", None),)),
    ],
    "Experts": [
        Run("step 16, one process", 16, 1, micro_batch(4, 8) + EXPERTS),
        Run("step 16, dp 2", 16, 2, micro_batch(2, 8) + " --dp_size 2" + EXPERTS, (("step 16, one process", None),)),
        Run("step 16, ep 2", 16, 2, micro_batch(2, 8) + " --dp_size 2 --ep_size 2" + EXPERTS,
            (("step 16, one process", None), ("step 16, dp 2", None))),
    ],
}
RUNS = {run.name: run for runs in GROUPS.values() for run in runs}


def make_tokens(folder: str, num_tokens: int) -> str:
    """The file of token ids that the loader of step 3 caches: ours find it there, the peers read it."""
    program = ("import sys; sys.path.insert(0, sys.argv[1]); from dataloader import encode_to_file; "
               "print(encode_to_file('sotu', sys.argv[2], int(sys.argv[3]), sys.argv[4]))")
    arguments = [STEPS["3"], f"{folder}/model", num_tokens, f"{folder}/token_cache"]
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()[-1]


def start(run: Run, folder: str, tokens: str, steps: int, **variables: str) -> Program:
    """`variables`: of the environment."""
    words = ["--model_name", f"{folder}/model"]
    if run.step is None:
        kind, *flags = run.flags.split()
        return Program(run.name, run.ranks, ROOT / "tools/maintain/peers.py", kind, *words, "--tokens", tokens, "--out",
                       f"{folder}/{run.name}.json", "--steps", steps, *flags, **variables)
    return Program(run.name, run.ranks, STEPS[str(run.step)] / "train.py", *words, "--log_dir", folder,
                   "--run_name", run.name, "--seq_len", 128, "--learning_rate", 3e-4, "--max_grad_norm", 0,
                   "--max_tokens", steps * TOKENS_A_STEP, *run.flags.split(), **variables)


def read_results(run: Run, folder: str) -> dict:
    """{"losses": [one a step], "seconds": [one a step], "memory_gb": at the peak, "grad_norm": the last step's}"""
    if run.step is None:
        return json.loads(pathlib.Path(folder, f"{run.name}.json").read_text())
    rows = metrics(folder, run.name)
    return {"losses": [row["loss"] for row in rows], "seconds": [row["step_seconds"] for row in rows],
            "memory_gb": rows[-1]["memory_gb"], "grad_norm": rows[-1]["grad_norm"]}


def check_losses(results: dict[str, dict], of_loss: float = 1e-5, of_norm: float = 1e-4,
                 of_compiled: float = 10) -> None:
    """Exits where two runs did not do the same work. Compiled runs, whose sums are reordered, are allowed more.

    AdamW hardly sees the scale of gradients, and so the losses don't: their norm must agree too.
    """
    reference = next(iter(results.values()))
    for name, result in results.items():
        reordered = of_compiled if "compile" in name else 1
        worst = max(abs(a - b) for a, b in zip(reference["losses"], result["losses"], strict=True))
        if not worst <= of_loss * reordered:  # a NaN is no agreement
            sys.exit(f"error: the losses of {name!r} are off by {worst:.1e}: not the same work, nothing to compare")
        norms = result["grad_norm"], reference["grad_norm"]
        if not abs(norms[0] / norms[1] - 1) <= of_norm * reordered:
            sys.exit(f"error: the gradient norm of {name!r} is {norms[0]:.6f} and not {norms[1]:.6f}: "
                     "not the same work, nothing to compare")
