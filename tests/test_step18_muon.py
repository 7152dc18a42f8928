"""Muon: torch's own, the owners' work and memory, and the bytes that chapter 18 promises.

That every topology computes what one process does: test_all_steps_same_math.py.
"""

import pytest
import torch
from lab.program import Program
from lab.ranks import run, threads
from lab.watch.held import Memory
from lab.watch.messages import Messages

STEP = Program(18).load()
muon = STEP.muon
TINY = ["--num_hidden_layers", 8, "--gradient_accumulation_steps", 1, "--dtype", "float32"]
MATRICES = 8 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128)  # their numbers, in the tiny Llama
WHOLE = MATRICES + 17 * 128 + 2 * 1024 * 128


def test_one_process_is_torchs_muon(world_of_one, monkeypatch):
    """Given the same gradients, the iteration in float64, which torch's does in bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    STEP.process_group_manager.setup_process_group_manager(1, 1, 1)
    shapes = (3, 7), (7, 3), (5, 5), (64, 16)
    layers = torch.nn.ParameterDict({"decoder_layers": torch.nn.ParameterList(
        torch.randn(shape, dtype=torch.float64) for shape in shapes)})
    layers.dtype, ours = torch.float64, [*layers.parameters()]
    theirs = [param.detach().clone() for param in ours]
    one = muon.Muon(STEP.data_parallel.DataParallelBucket(layers), muon.find_matrices(layers, None), 0.01)
    other = torch.optim.Muon(theirs, 0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    for _ in range(5):
        for param, twin in zip(ours, theirs):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.clone()
        one.step(), other.step()
    for param, twin in zip(ours, theirs):
        torch.testing.assert_close(param.data, twin, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shares", [[1, 1], [1, 1, 1, 1], [4, 2, 1]])
def test_owners_have_work_for_their_shares(shares):
    work = 8 * [*3 * [352 * 128**2], *2 * [128**3], *2 * [64**2 * 128]]
    owners = muon.choose_owners(work, shares)
    for rank, share in enumerate(shares):
        own = sum(each for each, owner in zip(work, owners) if owner == rank)
        assert own / sum(work) == pytest.approx(share / sum(shares), rel=0.04), rank


def test_state_is_divided_evenly_and_known_to_the_table():
    """Over four replicas the fullest rank holds at most 1.25 times the mean."""
    program = Program(18, [*TINY, "--optimizer", "muon", "--dp_size", 4, "--max_tokens", 64])
    [memory] = run(program, threads(4), [Memory()]).watches
    held = [memory.snapshots[rank]["after the step"]["optimizer"] for rank in range(4)]
    counters = 4 * 4 * 4  # AdamW has one for each of its shards, at most 4 a rank
    assert 0 < sum(held) - 4 * MATRICES - 8 * (WHOLE - MATRICES) <= counters
    assert max(held) <= 1.25 * sum(held) / 4, held


def test_messages():
    """Owners' gradients and weights are as many bytes as ZeRO's. Of tp ranks, each sends what is not its turn there
    and back."""
    def sent(ranks: int, *flags) -> int:
        program = Program(18, [*TINY, *flags, "--max_tokens", 2 * 16 * ranks])
        [messages] = run(program, threads(ranks), [Messages()]).watches
        return sum(size * number for found in messages.of_a_step()
                   for (kind, *_, size), number in found.items() if kind == "send")

    assert sent(3, "--dp_size", 3, "--optimizer", "muon") == 2 * (3 - 1) * 4 * WHOLE
    assert sent(2, "--tp_size", 2, "--optimizer", "muon") - sent(2, "--tp_size", 2) == 2 * MATRICES // 2 * 4
