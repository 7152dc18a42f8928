"""The loss over unlike pipelines, where samples have unlike numbers of targets: in training, and on validation data.

Against a plain loop, row by row without padding, in float64.
"""

import argparse
import json

import pytest
import torch
import torch.nn.functional as F
from launch import ROOT, modules_of, start_fork

with modules_of(9):
    import data_over_ranks
    from model import init_weights
    from data import encoded, load as data

pytestmark = pytest.mark.usefixtures("world_of_one")
TINY = str(ROOT / "assets" / "tiny_llama")


TOPOLOGIES = {  # name -> ranks, what data_over_ranks.py is told
    "one": (1, dict(family="ours", layers=[[3]], micro_batches=[6], tp_size=1)),
    "unlike": (3, dict(family="ours", layers=[[2, 1], [3]], micro_batches=[4, 2], tp_size=1)),
    "tp": (2, dict(family="ours", layers=[[3]], micro_batches=[6], tp_size=2)),
    "mixtral": (3, dict(family="mixtral", layers=[[2, 1], [3]], micro_batches=[4, 2], tp_size=1)),
    "text": (3, dict(family="ours", layers=[[2, 1], [3]], micro_batches=[4, 2], tp_size=1, dataset="text.jsonl")),
    "limited": (1, dict(family="ours", layers=[[3]], micro_batches=[6], tp_size=1, num_batches=2)),
}
WEIGHTED = ("one", "unlike", "tp", "mixtral")  # those whose samples have unlike numbers of targets
TOLERANCE = {"ours": 1e-11, "mixtral": 1e-7}  # transformers computes norms and routers in float32


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder: answers of 1 to 16 words after questions of 1 to 3, and text."""
    folder = tmp_path_factory.mktemp("answers")
    lines = [{"prompt": "So? " * (1 + i % 3), "completion": "word " * (1 + (i * i) % 16) + "."} for i in range(54)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": line["completion"]}) + "\n" for line in lines * 3))
    return folder


@pytest.fixture(scope="module")
def runs(corpus, selected):
    """runs(name): what each rank of that topology has found."""
    jobs = {}
    for name in dict.fromkeys(["one", *selected("name")]):
        if name in TOPOLOGIES:
            ranks, case = TOPOLOGIES[name]
            (out := corpus / name).mkdir()
            case = dict(case, dataset_name=str(corpus / case.get("dataset", "answers.jsonl")), tokenizer=TINY)
            jobs[name] = start_fork(9, ranks, out, json.dumps(case), script=data_over_ranks.__file__)

    def find(name: str) -> list[dict]:
        jobs[name].result()
        return [torch.load(corpus / name / f"{rank}.pt") for rank in range(TOPOLOGIES[name][0])]

    return find


def load(corpus, monkeypatch, dataset: str = "answers.jsonl"):
    """The data that all topologies read, in steps of 12 samples."""
    monkeypatch.setattr(encoded, "CACHE", str(corpus / "cache"))
    args = argparse.Namespace(**data_over_ranks.FLAGS, dataset_name=str(corpus / dataset))
    return data.load_data(args, TINY, 1024, 12)


def plain_model(family: str) -> tuple[torch.nn.Module, float]:
    """The whole model, and the coefficient of its router's loss."""
    model, _, _ = data_over_ranks.make_model(family)
    if family == "ours":
        init_weights(model, 0, torch.device("cpu"), lambda full, dim: full)
    return model, getattr(model.config, "router_aux_loss_coef", 0.0)


def step_of(family: str, made, step: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step, row by row without padding: the sum over all targets by their number."""
    (model, coefficient), size = plain_model(family), 2
    items = [made.train[step * 12 + i][0] for i in range(12)]
    in_step, loss = sum(int(row.is_target.sum()) for row in items), 0.0
    for first in range(0, 12, size):
        of_microbatch = items[first : first + size]
        for row in of_microbatch:
            out = model(row.tokens[None, :-1])
            logits = out if isinstance(out, torch.Tensor) else out.logits
            each = F.cross_entropy(logits[0], row.tokens[1:], reduction="none")
            loss = loss + each[row.is_target[1:]].sum() / in_step
        if coefficient:
            inputs = data.pad(of_microbatch)["input_ids"]
            loss = loss + coefficient * model(inputs).aux_loss / (12 / size)
    loss.backward()
    return loss.item(), {name: param.grad for name, param in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("name", WEIGHTED)
def test_every_target_counts_once(runs, corpus, name, monkeypatch):
    """Losses and gradients of two steps, over unlike micro-batches, pipelines and stages, in float64."""
    made, case = load(corpus, monkeypatch), TOPOLOGIES[name][1]
    made.train.set_steps(2)
    for step in range(2):
        expected, gradients = step_of(case["family"], made, step)
        for rank, found in enumerate(runs(name)):
            loss, parts = found["steps"][step]
            assert abs(loss - expected) < TOLERANCE[case["family"]]
            for parameter, part in parts.items():
                whole = gradients[parameter]
                for dim in (dim for dim in range(whole.dim()) if whole.shape[dim] != part.shape[dim]):
                    whole = whole.tensor_split(case["tp_size"], dim)[rank]
                assert (whole - part).abs().max() < TOLERANCE[case["family"]], parameter


@torch.no_grad()
def evaluation_of(family: str, samples) -> float:
    model, total, count = plain_model(family)[0].eval(), 0.0, 0
    for row in samples:
        if isinstance(row, torch.Tensor):
            row = encoded.Row(row, torch.ones_like(row, dtype=torch.bool))
        out = model(row.tokens[None, :-1])
        logits = out if isinstance(out, torch.Tensor) else out.logits
        each = F.cross_entropy(logits[0], row.tokens[1:], reduction="none")[row.is_target[1:]]
        total, count = total + each.sum().item(), count + len(each)
    return total / count


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_evaluation_is_the_same_on_every_topology(runs, corpus, name, monkeypatch):
    """A mean over the targets of all validation samples. It leaves the mode and the generators as they were."""
    case = TOPOLOGIES[name][1]
    samples = list(load(corpus, monkeypatch, case.get("dataset", "answers.jsonl")).evaluation)
    expected = evaluation_of(case["family"], samples[: 2 * case.get("num_batches", len(samples))])
    for found in runs(name):
        assert abs(found["evaluated"] - expected) < TOLERANCE[case["family"]] and found["untouched"]
    if name == "unlike":  # 7 micro-batches: the second pipeline takes every third
        assert len(samples) == 14 and [found["own"] for found in runs(name)] == [5, 5, 2]
    if name in ("unlike", "tp"):
        assert abs(found["evaluated"] - runs("one")[0]["evaluated"]) < 1e-12


def test_a_microbatch_without_a_target_has_gradients_of_zeros():
    logits = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    batch = {"target_ids": torch.full((2, 3), -100), "loss_weight": torch.zeros(())}
    loss = data.weighted(lambda *_: pytest.fail("there is nothing to compute"))(logits, batch)
    loss.backward()
    assert loss.item() == 0 and logits.grad.count_nonzero() == 0
