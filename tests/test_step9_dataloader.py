"""Step 9's loader: unequal shares, which together are what one process reads; epochs, permutations, dtypes."""

import random

import numpy as np
import pytest
import torch
from lab.program import Program

dataloader = Program(9).load().dataloader

SAMPLES = [{"input_ids": torch.tensor([i, i + 1]), "pixel_values": torch.tensor([i / 2])} for i in range(37)]


def loader(counts: list[int], pipeline: int = 0, size: int = 2, dataset=SAMPLES, **options):
    return dataloader.HeterogeneousDataLoader(dataset, size, counts, pipeline, torch.device("cpu"), torch.float64, **options)


def microbatches(of) -> list[list[int]]:
    """The numbers of the samples of each."""
    return [batch["input_ids"][:, 0].tolist() for batch in of]


@pytest.mark.parametrize("shuffle", [False, True])
def test_pipelines_together_read_what_one_process_reads(shuffle):
    counts, options = [3, 1, 2], {"shuffle": shuffle, "seed": 5}
    one = loader([6], **options)
    parts = [loader(counts, pipeline, **options) for pipeline in range(3)]
    epochs = []
    for epoch in range(2):
        for each in (one, *parts):
            each.set_epoch(epoch)
        together, apart = microbatches(one), [microbatches(part) for part in parts]
        assert one.steps_per_epoch == 3 == {part.steps_per_epoch for part in parts}.pop()  # 37 samples, 12 a step
        assert [len(part) for part in parts] == [len(found) for found in apart] == [9, 3, 6]
        for step in range(3):
            hands = [found[step * count : (step + 1) * count] for found, count in zip(apart, counts, strict=True)]
            dealt = {i: hand[k] for hand, mine in zip(hands, dataloader.deal_microbatches(counts), strict=True)
                     for k, i in enumerate(mine)}
            assert [dealt[i] for i in range(6)] == together[step * 6 : (step + 1) * 6]
        epochs.append(sum(together, []))
        assert len(set(epochs[-1])) == 36
    assert (epochs[0] == list(range(36))) == (not shuffle)
    assert (epochs[0] == epochs[1]) == (not shuffle)
    other_seed = microbatches(loader([6], shuffle=shuffle, seed=6))
    assert (other_seed == microbatches(loader([6], **options))) == (not shuffle)


def test_floats_take_the_dtype_and_numbers_stay():
    batch = next(iter(loader([1])))
    assert batch["pixel_values"].dtype == torch.float64 and batch["input_ids"].dtype == torch.int64
    assert batch["pixel_values"].tolist() == [[0.0], [0.5]]


def masked(items: list[dict]) -> dict:
    """As a collator that masks tokens at random, by each of the three sources of random numbers."""
    draws = {"torch": torch.rand(3), "random": torch.tensor(random.random()), "numpy": torch.tensor(np.random.rand())}
    return {**torch.utils.data.default_collate(items), **draws, "longest": 2}


@pytest.mark.parametrize("workers", [0, 1])
def test_stages_that_collate_at_random_get_the_same(workers):
    """Each stage draws under a state of its own, which stays as it is (dropout), and so does one process for all."""
    found, is_kept = [], []
    for stage, counts in enumerate(([1, 2], [1, 2], [3])):
        for seed in random.seed, np.random.seed, torch.manual_seed:
            seed(stage)
        batches = iter(loader(counts, len(counts) - 1, collate_fn=masked, num_workers=workers))
        found.append([next(batches)])
        before = random.getstate(), torch.get_rng_state().tolist()
        found[-1] += batches
        is_kept.append((random.getstate(), torch.get_rng_state().tolist()) == before)
    first, second, whole = found
    for name in "input_ids", "torch", "random", "numpy":
        first_values, second_values, values = ([batch[name].tolist() for batch in each] for each in found)
        assert first_values == second_values == [value for i, value in enumerate(values) if i % 3 > 0], name
        assert len({str(value) for value in values}) == len(values) and whole[0]["longest"] == 2
    assert all(is_kept)
    later = loader([3], collate_fn=masked)
    later.set_epoch(1)
    assert next(iter(later))["random"] != whole[0]["random"]


def test_less_than_one_step():
    with pytest.raises(ValueError, match=r"has 9 samples, fewer than a global batch of microbatch_size=2 x 5 micro-"):
        loader([3, 2], dataset=SAMPLES[:9])
    assert loader([3, 2], dataset=SAMPLES[:10]).steps_per_epoch == 1
