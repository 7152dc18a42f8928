"""Local steps of train_distributed.py: the update of the paper, written out here in one process, to 1e-11."""

import json
import math
import re

import pytest
import torch
from clusters import MEASURED
from huggingface import their_name
from launch import ROOT, fork, metrics, modules_of, start_fork

with modules_of(9):
    import local_steps_ranks as ranks_side
    import train_distributed
    from dataloader import deal_microbatches
    from model import cross_entropy

CASES = {
    "paper": {},
    "overlapped": dict(overlap_steps=1),
    "long overlap": dict(local_steps=4, steps=[4, 3, 5], overlap_steps=3),
    "unlike sizes": dict(steps=[2, 2, 2], sizes=[3, 1, 2], overlap_steps=1),
    "one SGD step": dict(local_steps=1, steps=[1, 1, 1], sizes=[3, 1, 2], inner="SGD", outer_learning_rate=1.0,
                         outer_momentum=0.0, max_grad_norm=0.0, warmup_steps=0, learning_rate=0.5),
    "int8": dict(gradient_wire_dtype="int8", epochs=1, rounds=1),
}


class Rank:
    """A model that takes local steps."""

    def __init__(self, case: dict, size: int, steps: int):
        self.case, self.size, self.steps, self.taken = case, size, steps, 0
        self.model = ranks_side.tiny_llama()
        self.params = list(self.model.parameters())
        self.optimizer = getattr(torch.optim, case["inner"])(self.params, lr=case["learning_rate"])
        self.warmup = round(case["warmup_steps"] * steps / case["local_steps"])

    def weights(self) -> torch.Tensor:
        return torch.cat([param.detach().flatten() for param in self.params])

    def set_weights(self, flat: torch.Tensor) -> None:
        for param, part in zip(self.params, flat.split([param.numel() for param in self.params])):
            param.data = part.view_as(param).clone()

    def step(self, micro_batches: list[torch.Tensor]) -> float:
        rate = self.case["learning_rate"] * min(1, (self.taken + 1) / (self.warmup + 1))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.zero_grad()
        loss = sum(cross_entropy(self.model(ids[None, :-1]), ids[None, 1:]) for ids in micro_batches) / self.size
        loss.backward()
        norm = sum((param.grad ** 2).sum() for param in self.params).sqrt()
        if self.case["max_grad_norm"] and norm > self.case["max_grad_norm"]:
            for param in self.params:
                param.grad *= self.case["max_grad_norm"] / (norm + 1e-6)
        self.optimizer.step()
        self.taken += 1
        return loss.item()


def written_out(case: dict) -> tuple[list[torch.Tensor], list[float]]:
    """The agreed weights at the end of each epoch, and the loss of each round: DiLoCo's algorithm 1, rank by rank.

    With an overlap, what round r has agreed on reaches a rank in round r + 1, as a correction of its weights.
    """
    ranks = [Rank(case, size, steps) for size, steps in zip(case["sizes"], case["steps"])]
    mean, data = case["local_steps"], ranks_side.samples(case)
    shares = [size / sum(case["sizes"]) for size in case["sizes"]]
    counts = [size * steps for size, steps in zip(case["sizes"], case["steps"])]
    agreed, velocity, epochs, losses = ranks[0].weights(), 0.0, [], []
    corrections = [None] * 3
    for number in range(case["epochs"] * case["rounds"]):
        of_round = data.view(case["rounds"], sum(counts), -1)[number % case["rounds"]]
        losses.append(0.0)
        for i, rank in enumerate(ranks):
            mine = of_round[deal_microbatches(counts)[i]].view(rank.steps, rank.size, -1)
            apply_at = min(math.ceil(case["overlap_steps"] * rank.steps / mean), rank.steps - 1)
            found = []
            for k in range(rank.steps):
                if k == apply_at and corrections[i] is not None:
                    rank.set_weights(rank.weights() + corrections[i])
                found.append(rank.step(list(mine[k])))
            losses[-1] += sum(found) / len(found) * counts[i] / sum(counts)
        ends = [rank.weights() for rank in ranks]
        gradient = sum(share * (agreed - end) for share, end in zip(shares, ends))
        velocity = case["outer_momentum"] * velocity + gradient
        agreed = agreed - case["outer_learning_rate"] * (gradient + case["outer_momentum"] * velocity)
        corrections = [agreed - end for end in ends]
        if case["overlap_steps"] == 0 or (number + 1) % case["rounds"] == 0:
            for rank in ranks:
                rank.set_weights(agreed)
            corrections = [None] * 3
        if (number + 1) % case["rounds"] == 0:
            epochs.append(agreed)
    return epochs, losses


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """name -> the case, and of each rank: its weights at the end of each epoch, and the loss of each round."""
    folder = tmp_path_factory.mktemp("local")
    (folder / "cases.json").write_text(json.dumps(CASES))
    fork(9, 3, folder, script=ranks_side.__file__)
    return {name: ({**ranks_side.DEFAULTS, **CASES[name]},
                   [torch.load(folder / f"{name}_{rank}.pt") for rank in range(3)]) for name in CASES}


@pytest.mark.parametrize("name", ["paper", "overlapped", "long overlap", "unlike sizes"])
def test_the_paper_written_out(trained, name):
    case, [(epochs, losses), *_] = trained[name]
    expected, expected_losses = written_out(case)
    assert len(epochs) == len(expected) == 2
    for weights, theirs in zip(epochs, expected):
        assert (weights - theirs).abs().max() <= 1e-11
    assert (expected[1] - expected[0]).abs().max() > 1e-3
    assert losses == pytest.approx(expected_losses, abs=1e-11)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_an_epoch_with_the_same_bits(trained, name):
    (epochs, losses), *others = trained[name][1]
    for others_epochs, others_losses in others:
        assert all(map(torch.equal, epochs, others_epochs)) and losses == others_losses


def test_an_outer_step_of_one_averages_weights(trained):
    """With SGD inside, and unlike numbers of micro-batches, it is SGD on the mean over all: data parallelism."""
    case, ranks = trained["one SGD step"]
    rank = Rank({**case, "sizes": [6]}, 6, 1)
    for _ in range(case["epochs"]):
        for batch in ranks_side.samples(case).view(case["rounds"], 6, -1):
            rank.step(list(batch))
    assert (rank.weights() - ranks[0][0][-1]).abs().max() <= 1e-11


def test_int8_within_its_bound(trained):
    """Each rank's difference is rounded, and the sum once more; the first outer step takes lr (1 + momentum) of it."""
    case, ranks = trained["int8"]
    [exact], _ = written_out(case)
    factor = case["outer_learning_rate"] * (1 + case["outer_momentum"])
    ends = max(case["steps"]) * case["learning_rate"] * 1.1  # AdamW moves no weight further
    off = (ranks[0][0][0] - exact).abs().max().item()
    assert 1e-6 < off <= factor * 2 * ends / 254, off


@pytest.fixture(scope="module")
def script_run(tmp_path_factory):
    """train_distributed.py on 3 ranks, with steps by measured speed."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "corpus.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    (folder / "cluster.json").write_text(json.dumps(MEASURED))
    flags = ["--dataset_name", folder / "corpus.txt", "--seq_len", 8, "--dtype", "float64", "--device", "cpu",
             "--batch_size", 1, "--gradient_accumulation", 1, "--epochs", 2, "--max_steps_per_epoch", 6,
             "--local_steps", 3, "--overlap_steps", 1, "--cluster_json", folder / "cluster.json", "--recompute",
             "--gradient_wire_dtype", "int8", "--log_dir", folder / "runs", "--checkpoint_dir", folder / "checkpoints"]
    run = start_fork(9, 3, folder / "out", ROOT / "cluster" / "train_distributed.py", *flags,
                     script=ROOT / "tests" / "support" / "record.py")
    return folder, run.result().stdout


def test_the_script(script_run):
    """Rounds by measured speed, a row for each, and a checkpoint of the agreed weights."""
    from safetensors.torch import load_file

    folder, printed = script_run
    assert "local steps of a round: 4, 1, 4\n" in printed
    assert "samples of a round, in micro-batches of up to 1: 4, 1, 4\n" in printed
    rows = metrics(folder / "runs", "train_distributed")
    assert [row["step"] for row in rows] == [1, 2, 3, 4] and rows[-1]["trained_tokens"] == 12 * 3 * 8
    assert rows[-1]["loss"] < rows[0]["loss"]
    epochs = [float(text) for text in re.findall(r"^epoch \d: loss (\S+)$", printed, re.MULTILINE)]
    means = [sum(row["loss"] for row in part) / 2 for part in (rows[:2], rows[2:])]
    assert epochs == pytest.approx(means, abs=1e-4)
    [*_, newest] = re.findall(r"^checkpoint: (\S+) ", printed, re.MULTILINE)
    assert newest == str(folder / "checkpoints" / "train_distributed" / "step_00000004"), "of 4 rounds"
    saved = load_file(f"{newest}/model-00001-of-00001.safetensors")
    for rank in range(3):
        final = torch.load(folder / "out" / f"rank{rank}.pt")["final"]
        assert len(final) == len(saved)
        assert all(torch.equal(saved[their_name(name)], param) for name, param in final.items())


def test_flags_that_do_not_go_together(monkeypatch):
    """Where ranks are started anew, all would begin anew after a loss: their optimizers are not saved."""
    for flags, expected in (
            (["--outer_momentum", 0.5], "--outer_momentum without local steps: add --local_steps 50"),
            (["--local_steps", 4, "--overlap_steps", 4], "--overlap_steps 4 must be below --local_steps 4"),
            (["--local_steps", 4, "--outer_momentum", 1], "--outer_momentum: must be from 0 to less than 1, got 1"),
            (["--local_steps", 4, "--profile_batch", 1], "--profile_batch 1: ranks that take local steps have no step"),
            (["--local_steps", 4, "--max_steps_per_epoch", 6], "--max_steps_per_epoch 6 is no multiple of --local_st"),
            (["--local_steps", 4], "--local_steps in an elastic run: ")):
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "100" if "elastic" in expected else "0")
        monkeypatch.setattr("sys.argv", ["train_distributed.py", *map(str, flags)])
        with pytest.raises(ValueError, match=re.escape(expected)):
            train_distributed.parse_args()
