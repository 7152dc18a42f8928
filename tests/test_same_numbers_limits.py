"""same_numbers: what a yes is about, and what is said where nothing can be compared; recordings of small loops here."""

import importlib.util
import json
import re
import subprocess
import sys
import time

import pytest
import same_numbers
import torch
from lab.launch import ROOT
from same_numbers.__main__ import main
from same_numbers.frameworks import place_cuts
from test_same_numbers import as_rank
from torch import nn


class Two(nn.Module):
    """(B, 6) -> (B, 4): a frozen layer and two trained ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.base, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 64), nn.Linear(64, 4)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.base(x))))


def nothing(*args):
    pass


def train(monkeypatch, folder, rank=0, world=1, dtype=torch.float64, prepare=nothing, change=nothing, made=None, lr=1e-3,
          loss=1.0, norm=None, wrap=lambda model: model, steps=3, kind=torch.optim.AdamW, adam=None):
    """Three steps as `rank`; `prepare` changes a model before, `change` its gradients in a step."""
    as_rank(monkeypatch, rank, world)
    model = (made or Two)()
    for param in model.parameters():
        param.data = param.data if param.is_complex() else param.data.to(dtype)
    prepare(model)
    optimizer = kind(model.parameters(), lr=lr, **adam or {})
    whole = wrap(model)
    recorder = same_numbers.Recorder(whole, optimizer, folder, steps=steps)
    for step in range(steps):
        data = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(dtype)
        out = whole(data)
        (out.abs() if out.is_complex() else out).square().mean().backward()
        change(model, step)
        length = sum(param.grad.norm() ** 2 for param in model.parameters() if norm and param.grad is not None) ** 0.5
        recorder.step(batch=data, loss=loss, norm=norm and (norm if isinstance(norm, str) else norm * length))
        optimizer.step()
        optimizer.zero_grad()
    recorder.close()


def compare(monkeypatch, capsys, tmp_path) -> tuple[int, str]:
    monkeypatch.setattr("sys.argv", ["same_numbers", str(tmp_path / "one"), str(tmp_path / "many")])
    try:
        code = main()
    except Exception as error:  # of what a user records there is no traceback
        code = f"{type(error).__name__}: {error}"
    return code, "".join(capsys.readouterr())


def scaled(factor, name="", first=0):
    def change(model, step):
        for each, param in model.named_parameters():
            if param.grad is not None and name in each and step >= first:
                param.grad.mul_(factor)
    return change


def no_gradients(model, step):
    model.zero_grad()


def with_nan(model, step):
    model.up.weight.grad[0, 0] = float("nan")


class Complex(Two):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.ones(6, dtype=torch.complex128))

    def forward(self, x):
        return super().forward((x * self.turn).real + (x * self.turn).imag)


def imaginary(model, step):
    if model.turn.grad is not None:
        model.turn.grad.imag.mul_(-1)


B, F = torch.bfloat16, torch.float32
CASES = {  # of both, of the second recording only; exit code, words
    "no gradient": (dict(change=no_gradients), {}, 2, "has no gradients"),
    "zeros": (dict(change=scaled(0)), {}, 2, "has no gradients"),
    "frozen": (dict(prepare=lambda model: model.requires_grad_(False), steps=0), {}, 2, ""),
    "nan": ({}, dict(change=with_nan), 1, "up.weight on ranks [0]"),
    "nan in both": (dict(change=with_nan), {}, 2, "up.weight, have NaN or infinity in both"),
    "loss": ({}, dict(loss=3.0), 1, "loss, of gradients that are right: 3 instead of 1"),
    "nan loss": ({}, dict(loss=float("nan")), 1, "the loss on ranks [0]"),
    "norm": (dict(norm=1.0), dict(norm=99.0), 1, "gradient norm"),
    "nan norm": (dict(norm=1.0), dict(norm=float("nan")), 1, "the norm on ranks [0]"),
    "base": ({}, dict(prepare=lambda model: model.base.bias.data.mul_(2)), 1, "frozen, base.bias"),
    "imaginary": (dict(made=Complex), dict(change=imaginary), 1, "turn: "),
    "no rate": (dict(dtype=B), dict(lr=0.0), 1, "the learning rate was"),
    "rate": (dict(dtype=B), dict(lr=1.5e-3), 1, "the learning rate was"),
    "ascent": (dict(dtype=B), dict(adam={"maximize": True}), 1, "its maximize was"),
    "warm-up": (dict(dtype=F, lr=1e-6), dict(lr=0.0), 1, "the learning rate was [0.0], not [1e-06]"),
    "beta": (dict(dtype=F), dict(adam={"betas": (0.9, 0.95)}), 1, "its betas was [0.9, 0.95], not [0.9, 0.999]"),
    "later": (dict(dtype=F), dict(change=scaled(1.02, first=1)), 1, "step 2: gradients, all 4 parameters: 1.02 times"),
    "fine": (dict(dtype=B, lr=1e-5), {}, 0, "bfloat16 hides less than"),
    "size": ({}, dict(change=scaled(1.01, "up.weight")), 1, "(largest: 0.01 of the right length, in up.weight)"),
    "rounding": ({}, dict(change=lambda model, step: model.down.weight.grad.copy_(model.down.weight.grad.float())), 0,
                 "as rounding in float32 does"),
    "compiled": ({}, dict(wrap=lambda model: Engine(Engine(model))), 0, "matched by their longest common rest"),
    "autocast": (dict(dtype=F), dict(wrap=lambda model: Mixed(model)), 0, "mixed precision was seen"),
    "sparse": (dict(kind=torch.optim.SGD), dict(change=lambda model, step: setattr(model.up.bias, "grad", model.up.bias.grad.to_sparse())), 0, ""),
    "fewer steps": ({}, dict(steps=2), 0, "not judged: steps [3]"),
}


class Box(torch.optim.Optimizer):
    """An optimizer that holds some, and hands nothing on but parameters."""

    def __init__(self, params, inner=torch.optim.AdamW, **settings):
        first, *others = params
        self.optimizers = {"all": [inner([first], **settings), inner(others, **settings)]}
        super().__init__([first, *others], {})

    def step(self):
        [each.step() for each in self.optimizers["all"]]


class Opaque:
    """Nobody can see what is in it."""

    def __init__(self, *args, **settings):
        self.step, self.zero_grad = (lambda: inner.step()), (lambda: inner.zero_grad())
        inner = torch.optim.AdamW(*args, **settings)


def noise_of(tensor, share: float):
    """As long as that share of the tensor."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(7)).to(tensor)
    return noise * share * tensor.norm() / noise.norm()


class Coarse(torch.optim.Optimizer):
    """Matrices move as in bfloat16, `apart` by noise. What else there is moves exactly. Its settings are as Muon's."""

    def __init__(self, params, lr, apart=0.0):
        self.apart = apart
        super().__init__(params, {"lr": lr, "momentum": 0.0})

    @torch.no_grad()
    def step(self):
        for param in [each for each in self.param_groups[0]["params"] if each.grad is not None]:
            change = param.grad.clone()
            if param.ndim > 1:
                change += noise_of(change, self.apart)
            param -= self.param_groups[0]["lr"] * change


class OfNumbers(torch.optim.SGD):
    """SGD, of which matrices move otherwise. It looks at each number alone, so nothing excuses that."""

    def __init__(self, params, lr, apart=0.0):
        self.apart = apart
        super().__init__(params, lr)

    @torch.no_grad()
    def step(self):
        for param in [each for each in self.param_groups[0]["params"] if each.grad is not None]:
            if param.ndim > 1:
                param.grad.add_(noise_of(param.grad, self.apart))
        super().step()


CASES |= {
    "box": (dict(dtype=B, kind=Box, lr=1e-5), dict(lr=2e-5), 1, "learning rate was [2e-05], not [1e-05], 2 times as large"),
    "decay": (dict(dtype=B, kind=Box), dict(adam={"weight_decay": 0.03}), 1, "its weight_decay was [0.03], not [0.01], 3 times"),
    "box and one": ({}, dict(kind=Box), 0, ""),
    "unknown": (dict(kind=Opaque), {}, 0, "the optimizer's settings of 4 of 4 parameters, which were not recorded"),
    "unknown rate": (dict(kind=Opaque), dict(lr=2e-3), 1, "is the learning rate 2 times as large when the optimizer steps?"),
    "unknown decay": (dict(kind=Opaque), dict(adam={"weight_decay": 0.5}), 1, "times the weights themselves: is it another"),
    "coarse": (dict(kind=Coarse), dict(adam={"apart": 0.05}), 0, "of right gradients they differ by up to 0.0"),
    "numbers": (dict(kind=OfNumbers), dict(adam={"apart": 0.05}), 1, "up.weight, down.weight: not as they should"),
    "shards": (dict(kind=Coarse), dict(adam={"apart": 0.5}), 1, "an optimizer that needs whole matrices (Muon)"),
    "norm of rounded ones": (dict(norm=1.0), dict(norm=1.0, change=lambda model, step: [
        param.grad.copy_(param.grad.float()) for param in model.parameters() if param.grad is not None]), 0, "something"),
    "digits": (dict(norm=1.0), dict(norm=1.000003), 1, "by rank instead of"),
    "digits of a loss": ({}, dict(loss=1.000004), 1, "1.000004 instead of 1, 1.000004 times"),
}


class Engine(nn.Module):
    def __init__(self, model):
        super().__init__()
        self._forward_module = model

    def forward(self, x):
        return self._forward_module(x)


class Mixed(Engine):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self._forward_module(x).float()


@pytest.mark.parametrize("name", CASES)
def test_a_yes_is_about_something(name, monkeypatch, tmp_path, capsys):
    both, second, code, words = CASES[name]
    if name == "frozen":
        both = dict(both, steps=1, change=nothing, prepare=lambda model: model.requires_grad_(False))
        monkeypatch.setattr(torch.Tensor, "backward", nothing)
        code, words = 2, "no trained parameters (all are frozen)"
    for folder, own in (("one", both), ("many", both | second)):
        train(monkeypatch, tmp_path / folder, **own)
    found, shown = compare(monkeypatch, capsys, tmp_path)
    assert found == code and words in shown, (found, shown)
    right, wrong = re.findall(r"(\S+),? (?:by rank )?instead of ([\d.]+)", shown)[0] if "digits" in name else "ab"
    assert right != wrong.rstrip("."), shown


def test_what_the_last_step_changed(monkeypatch, tmp_path, capsys):
    train(monkeypatch, tmp_path / "one")
    with monkeypatch.context() as patched:
        count, step = iter(range(9)), torch.optim.AdamW.step
        patched.setattr(torch.optim.AdamW, "step", lambda self: step(self) if next(count) < 2 else None)
        train(patched, tmp_path / "many")
    code, shown = compare(monkeypatch, capsys, tmp_path)
    assert code == 1 and "what step 3 changed in the weights" in shown, shown


@pytest.mark.parametrize("spoil, words", [
    (lambda folder: (folder / "rank0_step2.pt").write_bytes((folder / "rank0_step2.pt").read_bytes()[:300]), "cut off"),
    (lambda folder: (folder / "rank0_step2.pt").unlink(), "between 1 and 3 only [1, 3]"),
    (lambda folder: (folder / "rank0_start.pt").write_text("{}"), "can't be read"),
    (lambda folder: [path.unlink() for path in folder.iterdir()], "is missing"),
    (lambda folder: [(folder / path.name).write_bytes(path.read_bytes()) for path in (folder.parent / "one").iterdir()],
     "are the same recording"),
    (lambda folder: (folder / "rank0_step2 (copy).pt").write_text(""), "the same numbers in steps [1, 2, 3]"),
])
def test_files_that_are_not_whole_or_strange(spoil, words, monkeypatch, tmp_path, capsys):
    for folder in ("one", "many"):
        train(monkeypatch, tmp_path / folder)
    spoil(tmp_path / "many")
    code, shown = compare(monkeypatch, capsys, tmp_path)
    assert code == 2 * words.startswith(("cut", "betw", "can't", "is miss", "are")) and words in shown, (code, shown)


def test_an_empty_recorder_and_one_that_fails(monkeypatch, tmp_path, capsys):
    same_numbers.Recorder([], None, tmp_path / "many", steps=1).step()
    train(monkeypatch, tmp_path / "one", steps=1)
    code, shown = compare(monkeypatch, capsys, tmp_path)
    assert code == 2 and "Recorder was given none" in shown
    with pytest.warns(UserWarning, match="stops recording, the training goes on: ValueError"):
        train(monkeypatch, tmp_path / "many", norm="no number", steps=1)
    assert compare(monkeypatch, capsys, tmp_path)[0] == 2


def test_thousands_of_small_parameters_take_no_time(monkeypatch, tmp_path, capsys):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.ParameterList(torch.eye(4) * (i % 7 + 1) for i in range(5000))

        def forward(self, x):
            return x[:, :4] @ sum(self.weights)

    start = time.process_time()
    for folder in ("one", "many"):
        train(monkeypatch, tmp_path / folder, made=Many, steps=1)
    half, found = time.process_time() - start, compare(monkeypatch, capsys, tmp_path)
    assert found[0] == 0 and half < 10 and time.process_time() - start - half < 10, (half, found)


def test_a_gated_matrix_of_megatron_is_cut_in_both_of_its_halves():
    """partition_stride 2: each rank has a part of the gates, then a part of the rest."""
    for everyone, wanted in (([{"up": (0, 0, 8, 2)}], [[*range(8)]]),
                             ([{"up": (0, rank, 4, 2)} for rank in (0, 1)], [[0, 1, 4, 5], [2, 3, 6, 7]])):
        for rank, rows in enumerate(wanted):
            places = {"up": ((len(rows), 3), [torch.arange(len(rows)), torch.arange(3)])}
            place_cuts(places, everyone, rank)
            assert places["up"][1][0].tolist() == rows


def test_the_scoreboards_page_is_made_of_its_rows(tmp_path):
    spec = importlib.util.spec_from_file_location("page", ROOT / "tools" / "maintain" / "board" / "page.py")
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)
    rows = [json.loads(line) for line in (ROOT / "docs" / "scoreboard.jsonl").read_text().splitlines()]
    page.write(rows, tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text() == (ROOT / "docs" / "SCOREBOARD.md").read_text(), "scoreboard.py --page"
    assert not [row["row"] for row in rows if row.get("code") == 0 and not row["steps"] * row["gradients"] * row["samples"]]


def test_scripts_of_what_was_found_are_short_and_say_what_they_lack(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')\n")
    (tmp_path / "torchtitan.py").write_text("raise ImportError('not here')\n")
    for path in (ROOT / "same_numbers" / "found").glob("[!_]*.py"):
        assert len(path.read_text().splitlines()) <= 40 and path.name in (ROOT / "docs" / "FOUND.md").read_text(), path
    for name in ("tp_accumulation", "torchtitan_mtp"):
        ran = subprocess.run([sys.executable, ROOT / "same_numbers" / "found" / f"{name}.py"], capture_output=True, text=True,
                             env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}, timeout=100)
        assert ran.returncode == 2 and "needs" in ran.stdout, ran.stdout + ran.stderr
