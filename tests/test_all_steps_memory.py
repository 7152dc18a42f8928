"""What a step keeps for backward: no logits, and in a pipeline one copy of the weights for all live micro-batches.

With --recompute, of the activations only the inputs of decoder layers.
"""

import pytest
from lab.program import Program
from lab.ranks import run, threads
from lab.watch.kept import Kept

FEW, MANY = 4, 32  # micro-batches
LOGITS = """
import weakref
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

alive = []  # for each gradient of logits (B, T, V), whether they still exist


def watch(module, args, output):
    if module._get_name() in ("Linear", "ColumnParallelLinear") and output.shape[-1] == 1024:
        logits = weakref.ref(output)
        output.register_hook(lambda gradient: alive.append(logits() is not None))


torch.nn.modules.module.register_module_forward_hook(watch)
register_optimizer_step_post_hook(lambda *_: alive and print(f"alive: {sum(alive)} of {len(alive)}"))
"""
SHORT = ["--dtype", "bfloat16", "--num_hidden_layers", 4, "--pp_size", 4, "--micro_batch_size", 3, "--seq_len", 8]


def kept_by_ranks(step: int, flags: list) -> list[dict[int, dict]]:
    """For few and for many micro-batches, what each rank kept."""
    programs = [Program(step, [*SHORT, *flags, "--gradient_accumulation_steps", m, "--max_tokens", m * 24])
                for m in (FEW, MANY)]
    return [run(program, threads(4), [Kept()]).watches[0].most for program in programs]


@pytest.mark.parametrize("step, flags", [
    (8, ["--pp_engine", "afab"]), pytest.param(7, [], marks=pytest.mark.slow),
    pytest.param(9, ["--pp_engine", "afab"], marks=pytest.mark.slow)], ids=["8", "7", "9"])
def test_all_live_micro_batches_share_one_copy_of_the_weights(step, flags):
    """bfloat16 runs multiply with copies of the float32 weights; backward needs the copies again."""
    for few, many in zip(*(of.values() for of in kept_by_ranks(step, flags)), strict=True):
        assert MANY / FEW - 1 < many["others"] / few["others"] <= MANY / FEW, "activations grow with the micro-batches"
        for kept in (few, many):
            assert kept["one_copy"] / 4 < kept["weights"] <= kept["one_copy"], (kept["weights"] / kept["one_copy"])


@pytest.mark.parametrize("step", [8, pytest.param(9, marks=pytest.mark.slow)])
def test_recomputing_keeps_the_inputs_of_layers(step):
    """Stages in the middle consist of layers only, here two each: a live micro-batch adds two inputs, in bfloat16."""
    few, many = kept_by_ranks(step, ["--pp_engine", "afab", "--num_hidden_layers", 8, "--recompute"])
    layer_input = 3 * 8 * 128 * 2  # (B, T, D)
    for rank in (1, 2):
        assert many[rank]["others"] - few[rank]["others"] == (MANY - FEW) * 2 * layer_input
    for rank in (0, 3):  # besides: token ids, and what the loss keeps
        assert many[rank]["others"] - few[rank]["others"] > (MANY - FEW) * 2 * layer_input


@pytest.mark.parametrize("step, stages", [
    *((step, 1) for step in (*range(1, 11), 12, 13, 15)), *((step, 2) for step in range(7, 11))])
def test_backward_begins_without_the_logits(run_code, tmp_path, step, stages):
    """They are the largest tensor where the vocabulary is large. A name for them keeps them alive."""
    flags = ["--num_hidden_layers", 2, "--seq_len", 8, "--micro_batch_size", 1, "--max_tokens", 16]
    flags += ["--gradient_accumulation_steps", 2] if step > 2 else []
    flags += ["--log_dir", tmp_path, "--pp_size", stages] if step > 1 else []
    done = run_code(step, stages, LOGITS, *flags, then="train.py")
    alive = [line for line in done.stdout.splitlines() if line.startswith("alive")]
    assert alive == (["alive: 0 of 2"] if step > 2 else ["alive: 0 of 1", "alive: 0 of 2"])
