"""same_numbers: where token ids and samples are found, what is said where they are not, and what micro-batches tell."""

import datetime
import importlib.util

import pytest
import same_numbers
import torch
import torch.distributed as dist
import torch.multiprocessing
from same_numbers import frameworks, places
from same_numbers.samples import digests, number, token_ids
from test_same_numbers import as_rank
from torch import nn

IDS, FLOATS = torch.arange(6).view(2, 3), torch.rand(2, 3, 4)
MASK, PLACES = torch.ones(2, 3, dtype=torch.bool), torch.arange(3).repeat(2, 1)


class Named(nn.Module):
    def forward(self, positions=None, x=None, input_ids=None, labels=None):
        pass


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Named()

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


@pytest.mark.parametrize("made", [Named, Wrapped])
@pytest.mark.parametrize("args, kwargs, found", [
    ((PLACES, IDS), {}, True), ((PLACES,), {"x": IDS}, True), ((), {"labels": PLACES, "x": IDS}, True),
    ((None, None, IDS), {}, True), ((None, [IDS, PLACES]), {}, True),
    ((), {"x": {"position_ids": PLACES, "labels": PLACES, "tokens": IDS}}, True),
    ((), {"x": FLOATS, "input_ids": IDS}, True), ((), {"input_ids": None, "x": FLOATS, "positions": PLACES}, False),
    ((PLACES, FLOATS), {}, False), ((PLACES,), {"x": (FLOATS, PLACES)}, False), ((MASK,), {"extra": MASK}, False),
    ((), {"x": {"hidden": FLOATS, "position_ids": PLACES}}, False), ((PLACES, FLOATS[0, 0]), {"labels": IDS}, False)])
def test_token_ids_are_the_first_argument_and_no_positions_or_masks(made, args, kwargs, found):
    assert token_ids(made(), args, kwargs) is (IDS if found else None)


def test_samples_of_dtensors_and_nested_tensors_and_numbers_of_python(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    nested = torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    assert digests(nested) == digests([torch.arange(3)[None], torch.arange(2)[None]])
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert digests({"ids": distribute_tensor(IDS, init_device_mesh("cpu", (1,)), [Shard(0)])}) == digests(IDS)
    finally:
        dist.destroy_process_group()
    assert digests({"ids": IDS, "count": torch.tensor(3)}) == digests(IDS)
    assert number(0.1) == 0.1 and number(torch.tensor(0.1)) != 0.1 and number(None) is None


def record(folder, batches, model=None, before=lambda step: None, inputs=lambda ids: ids, rank=0, world=1, step=True,
           monkeypatch=None, **options):
    """A step of each list of micro-batches, of token ids."""
    if monkeypatch:
        as_rank(monkeypatch, rank, world)
    torch.manual_seed(0)
    model = model or nn.Sequential(nn.Embedding(48, 8), nn.Linear(8, 4)).double()
    recorder = same_numbers.Recorder(model, torch.optim.SGD(model.parameters(), 0.1), folder, steps=len(batches))
    for number, batch in enumerate(batches):
        model.zero_grad()
        for ids in batch:
            (model(ids).square().mean() / len(batch)).backward()
        before(model)
        recorder.step(**options)


def rows(*numbers) -> torch.Tensor:
    return torch.stack([torch.arange(4) + 4 * number for number in numbers])


@pytest.mark.parametrize("last, words", [
    (rows(4, 0, 1), "0 of 1 are read by nobody, and 2 others are: they are those of step 1, read again: is an epoch's last"),
    (rows(4, 0, 2), "they are those of steps 1, 2, read again: is an epoch's last batch padded by its first samples"),
    (rows(0, 1), "they are those of step 1: does a resumed run begin its data anew?"),
    (rows(4, 7), "another order, another seed of the shuffle, or other data?")])
def test_samples_that_are_read_again(last, words, tmp_path):
    record(tmp_path / "one", [[rows(0, 1)], [rows(2, 3)], [rows(4)]])
    record(tmp_path / "many", [[rows(0, 1)], [rows(2, 3)], [last]])
    assert words in same_numbers.compare(tmp_path / "one", tmp_path / "many").found[0].line


class Own(nn.Module):
    """As a LightningModule's: nobody calls its forward in one process."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Embedding(48, 8), nn.Linear(8, 4)).double()

    def __call__(self, ids):
        return self.model(ids)


def test_samples_that_were_not_recorded_are_noted_and_no_mask_is_blamed(tmp_path):
    record(tmp_path / "one", [[rows(0, 1)]], Own())
    record(tmp_path / "many", [[rows(0, 1)]])
    record(tmp_path / "wrong", [[rows(2, 1)]])
    verdict = same_numbers.compare(tmp_path / "one", tmp_path / "many")
    said = f"samples were not recorded in {tmp_path}/one"
    assert not verdict.found and any(said in note and "batch=" in note for note in verdict.notes)
    line = same_numbers.compare(tmp_path / "one", tmp_path / "wrong").found[0].line
    assert said in line and "batch=" in line and "positions, masks" not in line


@pytest.mark.parametrize("shares, of, words", [
    ((4, 2, 1), "1.", "count 4, 2, 1 times: what was summed over 2 ranks already is summed again"),
    ((1.2, 0.9, 0.9), "", "count 1.2, 0.9, 0.9 times: is the mean over micro-batches or ranks taken where the mean over")])
def test_micro_batches_that_count_unlike_are_named_also_where_something_rounds(shares, of, words, monkeypatch, tmp_path):
    batch = [rows(i, i + 1) for i in range(3)]

    def weighted(model):
        grads = []
        for ids in batch:
            model.zero_grad()
            (model(ids).square().mean() / 3).backward()
            grads.append({name: param.grad.clone() for name, param in model.named_parameters()})
        for name, param in model.named_parameters():
            used = shares if of in name else (1, 1, 1)
            param.grad = sum(share * each[name] for share, each in zip(used, grads)).float().double()

    record(tmp_path / "one", [batch])
    for rank in range(2):
        record(tmp_path / "many", [batch], before=weighted, rank=rank, world=2, monkeypatch=monkeypatch)
    line = same_numbers.compare(tmp_path / "one", tmp_path / "many").found[0].line
    assert words in line, line


def outputs(*given, shift=0.0) -> dict:
    """A rank's record of three samples: (module, numbers in a row, first wrong)."""
    return {"samples": ["3:a", "3:b", "3:c"], "outputs": {
        name: {"shape": (size,), "bounds": ((0, size),), "gradient": torch.full((3, size), torch.nan),
               "output": torch.arange(3.0 * size).view(3, size) + 1 + wrong} for name, size, wrong in given}}


def test_outputs_that_cannot_be_compared_are_said_and_samples_count_once():
    one = [outputs(("a", 4, 0), ("cut", 4, 0), ("b", 4, 0))]
    many = [outputs(("a", 4, 0), ("cut", 2, 0), ("b", 4, 1))] * 2
    words = places.where(one, many, 1e-9, False, False)
    assert words.startswith("first wrong in forward, of those that could be compared (not cut: ranks have parts of it")
    assert "the output of b, of all 3 samples" in words
    whole = [outputs(("a", 4, 0), ("cut", 4, 0), ("b", 4, 1))] * 2
    assert places.where(one, whole, 1e-9, False, False).startswith("first wrong in forward: the output of b, of all 3")


def gather(rank: int, folder: str) -> None:
    """Rank 1 has no numpy, as far as it sees."""
    found = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *rest: None if rank and name == "numpy" else found(name, *rest)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2,
                            timeout=datetime.timedelta(seconds=10))
    dist.all_gather_object = None  # what ranks call alike must not depend on what one of them has
    model = nn.Linear(2 + 2, 2)
    model.weight.tensor_model_parallel, model.weight.partition_dim = True, 1
    same_numbers.Recorder(model, torch.optim.SGD(model.parameters(), 0.1), f"{folder}/many", steps=1)
    assert [each["rank"] for each in frameworks.gather({"rank": rank, "more": "x" * 99 * rank}, 2)] == [0, 1]
    dist.destroy_process_group()


def test_ranks_with_and_without_numpy_call_the_same_collectives(tmp_path):
    torch.multiprocessing.start_processes(gather, (str(tmp_path),), nprocs=2, start_method="fork")


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors_of_token_ids_go_through_a_recorder(layout, tmp_path):
    """What a model can do with them is its own affair: the recording goes on."""
    model = nn.Embedding(32, 4)
    model.forward = lambda ids: sum(nn.functional.embedding(each, model.weight).sum() for each in ids.unbind())
    recorder = same_numbers.Recorder(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path)
    model(torch.nested.nested_tensor([torch.arange(3), torch.arange(2)], layout=layout)).backward()
    recorder.step()
    assert not recorder.is_over and not list(tmp_path.glob("*error*"))
    assert len(torch.load(tmp_path / "rank0_step1.pt", weights_only=False)["samples"]) == 2


def test_outputs_are_matched_where_a_batch_is_several_tensors(tmp_path):
    """As Lightning's callback gives it: samples are of all its tensors, outputs of what the model was given."""
    found = {}
    for name, shift in (("one", 0.0), ("many", 0.3)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 1)).double()
        if shift:
            model[1].register_forward_hook(lambda module, given, output: output + shift)
        recorder = same_numbers.Recorder(model, torch.optim.SGD(model.parameters(), 0.1), tmp_path / name, modules="blocks")
        ids, wanted = torch.arange(12).view(4, 3), torch.ones(4, 3, dtype=torch.float64)
        (model(ids).squeeze(-1) - wanted).square().mean().backward()
        recorder.step(batch=(ids, wanted))
        recorder.close()
        found[name] = tmp_path / name
    lines = [each.line for each in same_numbers.compare(found["one"], found["many"]).found]
    assert "first wrong in forward: the output of 1" in lines[0], lines
