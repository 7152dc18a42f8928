"""Muon: torch's own, the owners' work and memory, and the bytes that chapter 18 promises.

That every topology computes what one process does: test_all_steps_same_math.py.
"""

from types import SimpleNamespace

import pytest
import splits
import torch
import torch.distributed as dist
from launch import modules_of
from messages import messages
from step_modules import StepSource, train
from test_tool_choose import JOB
from torch.optim.optimizer import register_optimizer_step_post_hook

with modules_of(18):
    import muon

GRID = dict(dp_rank=0, dp_world_size=1, tp_rank=0, tp_world_size=1, is_logging_rank=False)
TINY = ["--num_hidden_layers", 8, "--gradient_accumulation_steps", 1, "--optimizer", "muon"]  # of the tiny Llama
MATRICES = 8 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 352 * 128)  # their numbers
WHOLE = MATRICES + 17 * 128 + 2 * 1024 * 128


@pytest.fixture
def grid(monkeypatch):
    """grid(**sizes): the process group manager that muon.py finds, of one process where `sizes` say nothing."""
    return lambda **sizes: monkeypatch.setattr(muon.pgm, "process_group_manager", SimpleNamespace(**GRID | sizes))


class Blocks(torch.nn.Module):
    dtype = torch.float64

    def __init__(self, *shapes: tuple[int, int]):
        super().__init__()
        self.decoder_layers = torch.nn.ParameterList(torch.randn(shape, dtype=self.dtype) for shape in shapes)
        self.embedding = torch.nn.Parameter(torch.randn(9, 4, dtype=self.dtype))


def test_one_process_is_torchs_muon(grid, monkeypatch):
    """Given the same gradients, the iteration in float64, which torch's does in bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    grid()
    ours = Blocks((3, 7), (7, 3), (5, 5), (64, 16))
    theirs = [param.detach().clone() for param in ours.decoder_layers]
    wrapper = SimpleNamespace(module=ours, gradient=lambda param: param.grad)
    one = muon.Muon(wrapper, muon.find_matrices(ours, None), 0.01)
    other = torch.optim.Muon(theirs, 0.01, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    before = ours.embedding.detach().clone()
    for _ in range(5):
        ours.embedding.grad = torch.randn_like(ours.embedding)
        for param, twin in zip(ours.decoder_layers, theirs):
            param.grad = torch.randn_like(param)
            twin.grad = param.grad.clone()
        one.step(), other.step()
    for param, twin in zip(ours.decoder_layers, theirs):
        torch.testing.assert_close(param.data, twin, rtol=0, atol=1e-12)
    assert torch.equal(ours.embedding, before)


def test_singular_values_come_near_one():
    for shape in ((40, 90), (90, 40), (33, 33)):
        matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        inside = u.T @ muon.orthogonalize(matrix) @ v.T  # diagonal: U and V are kept
        values = inside.diagonal()
        torch.testing.assert_close(inside, values.diag(), rtol=0, atol=1e-9)
        assert values[:-2].min() > 0.65 and values.max() < 1.25, shape


@pytest.mark.parametrize("shares", [None, [1, 1, 1, 1], [4, 2, 1]])
def test_owners_have_work_for_their_shares(grid, shares):
    grid(dp_world_size=len(shares or [1, 1]), tp_world_size=1)
    shapes = [(352, 128), (352, 128), (128, 352), (128, 128), (128, 128), (64, 128), (64, 128)] * 8
    matrices = muon.find_matrices(Blocks(*shapes), shares)
    shares = shares or [1, 1]
    load = [sum(matrix.work for matrix in matrices if matrix.owner == rank) for rank in range(len(shares))]
    for rank, share in enumerate(shares):
        assert load[rank] / sum(load) == pytest.approx(share / sum(shares), rel=0.04), rank


def test_state_is_divided_evenly_and_known_to_the_table():
    """Over four replicas the fullest rank holds at most 1.25 times the mean, the numbers of splits.py on average."""
    states = [{} for _ in range(4)]

    def count(optimizer, *_) -> None:
        states[dist.get_rank()][type(optimizer).__name__] = sum(
            tensor.nbytes for state in optimizer.state.values() for tensor in state.values() if tensor.dim())

    hook = register_optimizer_step_post_hook(count)
    try:
        train(StepSource(18), 4, [*TINY, "--dp_size", 4, "--max_tokens", 64, "--dtype", "float32"])
    finally:
        hook.remove()
    held = [sum(state.values()) for state in states]
    assert all(set(state) == {"AdamW", "Muon"} for state in states)
    assert sum(held) == 4 * MATRICES + 8 * (WHOLE - MATRICES)
    assert max(held) <= 1.25 * sum(held) / 4, held
    job = JOB._replace(muon=True)
    assert splits.held(job, splits.Split(4, 1, 1, "-", 1), 0, 1)["AdamW"] == pytest.approx(sum(held) / 4)


def sent(ranks: int, *flags) -> int:
    flags = [*TINY, *flags, "--dtype", "float32", "--max_tokens", 2 * 16 * ranks]
    return sum(size * number for found in messages(18, ranks, flags)
               for (kind, *_, size), number in found.items() if kind == "send")


def test_owners_send_what_shards_do():
    """Gradients to the owner, weights to all: of all replicas together 2 (N - 1) times the weights."""
    assert sent(3, "--dp_size", 3) == 2 * (3 - 1) * 4 * WHOLE


def test_tp_ranks_send_matrices_there_and_back():
    """Each of t ranks has 1/t of all matrices, of which (t - 1)/t belong to others' turns, or a bit less or more."""
    more = sent(2, "--tp_size", 2) - sent(2, "--tp_size", 2, "--optimizer", "adamw")
    assert more == 2 * MATRICES // 2 * 4
