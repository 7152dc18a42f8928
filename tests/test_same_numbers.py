"""same_numbers: the verdict on foreign trainers, and on ranks that are made here one after the other."""

from unittest import mock

import pytest
import same_numbers
import torch
from lab.launch import ROOT, start_fork
from same_numbers.__main__ import main
from torch import nn

FOREIGN = {  # a trainer, its fault and ranks: words of the verdict
    ("fsdp2", "early", 2): "the optimizer does not hold 29 of them",
    ("fsdp2", "own_norm", 4): "does each rank clip by its own norm?",
    ("dtensor", "norms", 2): "norm*.weight, norm.weight: unlike on ranks that should hold the same, whose sum is right",
    ("accelerate", "twice", 2): "6 times too small = the number of micro-batches",
    ("trainer", "means", 2): "count 0.939, 1.08, 1.28, 1.56, 0.782, 0.88, 1.01, 1.17, 1.41, 0.741, 0.828, 0.939 times",
    ("lora", "seeds", 2): "weights at the start, base_model.model.layers.*.q.lora_A.default.weight",
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("kind, fault, ranks", FOREIGN)
def test_a_foreign_trainer_is_right_and_its_fault_is_named(kind, fault, ranks, tmp_path):
    flags = {"one": (), "right": (), "wrong": ("--fault", fault)}
    runs = [start_fork(0, 1 if name == "one" else ranks, kind, tmp_path / name, *flags[name],
                       script=ROOT / "tests" / "support" / "trainers_of_libraries.py") for name in flags]
    [run.result() for run in runs]
    assert verdict(tmp_path, "right") == ""
    assert FOREIGN[kind, fault, ranks] in verdict(tmp_path, "wrong")


def verdict(folder, many: str) -> str:
    return "\n".join(each.line for each in same_numbers.compare(folder / "one", folder / many).found)


class Net(nn.Module):
    """(B, 5) -> (B, 3), with a tied weight and a frozen one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.frozen, self.down = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.same = nn.Module()
        self.same.weight = self.up.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.down(self.frozen(self.up(x)))


def as_rank(monkeypatch, rank: int, world: int) -> None:
    """All that a recorder asks torch.distributed."""
    asked = ["is_available", "is_initialized", "get_rank", "get_world_size", "all_gather_object"]
    answers = {"get_rank.return_value": rank, "get_world_size.return_value": world}
    monkeypatch.setattr(same_numbers.recorder, "dist", mock.Mock(spec_set=asked, **answers))


def record(monkeypatch, folder, rank: int = 0, world: int = 1, change=lambda model: None, cut=None, dtype=torch.float64,
           before=lambda model: None):
    """One step as rank `rank`. change(model) makes a fault of the gradients; `cut`: rows of up.weight that it holds."""
    as_rank(monkeypatch, rank, world)
    model = Net().to(dtype)
    before(model)
    data = torch.randn(4, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)
    model(data).square().mean().backward()
    change(model)
    if cut is not None:
        grad = model.up.weight.grad[cut]
        model.up.weight = model.same.weight = nn.Parameter(model.up.weight.detach()[cut])
        model.up.weight.grad = grad
    parts = {} if cut is None else {"up.weight": ("up.weight", {0: (cut.start, 7)})}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorder = same_numbers.Recorder(model, optimizer, folder, steps=1, parts=parts.get)
    recorder.step(batch=data, loss=1.0)


def scale(name: str, factor: float):
    return lambda model: model.get_parameter(name).grad.mul_(factor)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("change, words", [
    (lambda model: None, ""), (scale("down.bias", -1), "down.bias: of the wrong sign"),
    (scale("up.weight", 1.01), "up.weight: 1.01 times too large"),
    (lambda model: setattr(model.down.weight, "grad", None), "down.weight: ranks have none"),
    (lambda model: model.up.weight.grad.copy_(model.up.weight.grad.roll(1, 0)), "up.weight: wrong, by no common"),
])
def test_uneven_parts_tied_and_frozen_weights(change, words, dtype, monkeypatch, tmp_path):
    record(monkeypatch, tmp_path / "one", dtype=dtype)
    for rank, cut in enumerate((slice(0, 3), slice(3, 7))):
        record(monkeypatch, tmp_path / "many", rank, 2, change, cut, dtype)
    assert verdict(tmp_path, "many").endswith(words) if not words else words in verdict(tmp_path, "many")


def test_a_rank_that_holds_the_part_of_another(monkeypatch, tmp_path):
    record(monkeypatch, tmp_path / "one")
    for rank, cut in enumerate((slice(0, 3), slice(3, 6))):
        record(monkeypatch, tmp_path / "many", rank, 2, cut=cut,
               before=lambda model: rank and model.up.weight.data.copy_(model.up.weight.roll(3, 0)))
    assert "rank 1 holds the part of rank 0" in verdict(tmp_path, "many")


def test_recordings_that_do_not_belong_together(monkeypatch, tmp_path, capsys):
    record(monkeypatch, tmp_path / "one")
    record(monkeypatch, tmp_path / "again")
    record(monkeypatch, tmp_path / "short", dtype=torch.float32)
    record(monkeypatch, tmp_path / "cut", cut=slice(0, 3))
    record(monkeypatch, tmp_path / "half", world=2)
    record(monkeypatch, tmp_path / "wrong", change=scale("down.bias", 2))
    for name, code, words in (("again", 0, "the same numbers in steps [1]"), ("wrong", 1, '"by": "2 times too large'),
                              ("short", 2, "the dtype of up.weight is float64 in"),
                              ("half", 2, "the recorded steps are [[1], []]"),
                              ("absent", 2, "is no folder: name the one")):
        argv = ["same_numbers", str(tmp_path / "one"), str(tmp_path / name), *["--json"] * (code == 1)]
        monkeypatch.setattr("sys.argv", argv)
        assert main() == code
        shown = "".join(capsys.readouterr())
        assert words in shown and (shown.count("\n") == 1 or code < 2)
