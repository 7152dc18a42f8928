"""Interleaved schedules: each rank holds several chunks of the model, so a step's first micro-batch is through sooner.

With p ranks and v chunks per rank, the layers are divided into v p virtual stages. Rank r holds the virtual stages r,
r + p, r + 2p, ...: its chunks 0, 1, 2, .... A micro-batch therefore visits all ranks v times. After its chunk c, the
last rank sends its hidden states to the first rank, for chunk c + 1.

Interleaved 1F1B with p = 4 ranks, v = 2 chunks and m = 4 micro-batches. Capital letters are chunk 0, small letters are
chunk 1, and a column is the time of one chunk, half as long as that of a stage without chunks:

    rank 0   F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0 .  b1 .  b2 .  b3 B0 B1 B2 B3
    rank 1   .  F0 F1 F2 F3 f0 f1 f2 f3 .  b0 .  b1 .  b2 .  b3 B0 B1 B2 B3 .
    rank 2   .  .  F0 F1 F2 F3 f0 f1 f2 b0 f3 b1 .  b2 .  b3 B0 B1 B2 B3 .  .
    rank 3   .  .  .  F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 B0 B1 B2 B3 .  .  .

Micro-batches proceed in rounds of p: a whole round passes chunk 0, then chunk 1, and so on, before the next one starts.
The idle time at both ends is that of p - 1 chunks instead of p - 1 stages, so the bubble is (p-1)/(v m + p-1). The
price: messages cross v p - 1 boundaries instead of p - 1, and the activations of more micro-batches are alive.

With backward in two parts (weight_gradients.py), W fills the gaps. If p divides m, a rank keeps the activations of v p
chunks, as many as the first stage of 1F1B:

    rank 0   F0 F1 F2 F3 f0 f1 f2 f3 .  .  .  b0 w0 b1 w1 b2 w2 b3 w3 B0 W0 B1 W1 B2 W2 B3 W3
    rank 1   .  F0 F1 F2 F3 f0 f1 f2 .  .  b0 f3 b1 w0 b2 w1 b3 w2 B0 w3 B1 W0 B2 W1 B3 W2 W3
    rank 2   .  .  F0 F1 F2 F3 f0 f1 .  b0 f2 b1 f3 b2 w0 b3 w1 B0 w2 B1 w3 B2 W0 B3 W1 W2 W3
    rank 3   .  .  .  F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 w0 B0 w1 B1 w2 B2 w3 B3 W0 W1 W2 W3
"""

import functools
from collections.abc import Iterator

import torch

import pipeline_parallel
from pipeline_parallel import Action, postpone_weight_gradients
from utils import UserError


def rounds(kind: str, num_stages: int, num_microbatches: int, num_chunks: int) -> Iterator[list[Action]]:
    """The forwards ("F") or backwards ("B") of a rank in their order, one list per round.

    A round has at least p micro-batches, so that the first one is back at rank 0 when rank 0 has forwarded the last
    one. Where p does not divide m, rounds are longer, the first ones by one more. For m < p there is one round.
    """
    for round in torch.arange(num_microbatches).tensor_split(max(num_microbatches // num_stages, 1)):
        chunks = range(num_chunks) if kind == "F" else reversed(range(num_chunks))
        yield [Action(kind, i, chunk) for chunk in chunks for i in round.tolist()]


def interleave(stage: int, num_stages: int, num_microbatches: int, num_chunks: int, hops: int) -> Iterator[Action]:
    """One forward, one backward, over chunks. A stage's warm-up is longer than the next one's by `hops` forwards."""
    forwards = list(rounds("F", num_stages, num_microbatches, num_chunks))
    warm_up = len(forwards[0]) // num_chunks * (num_chunks - 1) + hops * (num_stages - 1 - stage)
    forwards, backwards = sum(forwards, []), sum(rounds("B", num_stages, num_microbatches, num_chunks), [])
    yield from forwards[:warm_up]
    for forward, backward in zip(forwards[warm_up:], backwards):  # steady state
        yield forward
        yield backward
    yield from backwards[len(forwards[warm_up:]) :]  # cool-down


def interleaved(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Iterator[Action]:
    """Interleaved 1F1B (Narayanan et al. 2021). At most (v-1) p + 2 (p - stage) - 1 chunks are alive if p divides m.

    The warm-up shrinks by two forwards per stage. One would be enough if messages took no time: a stage has one forward
    more under way than the next one. The second lets it compute while a message travels, and costs memory.
    """
    return interleave(stage, num_stages, num_microbatches, num_chunks, hops=2)


def interleaved_zero_bubble(stage: int, num_stages: int, num_microbatches: int, num_chunks: int) -> Iterator[Action]:
    """Interleaved 1F1B with W (Qi et al. 2023): each W comes `stage` B after its own. At most v p are alive if p | m.

    The warm-up shrinks by one forward per stage. While a message travels, a stage can do a W.
    """
    return postpone_weight_gradients(interleave(stage, num_stages, num_microbatches, num_chunks, hops=1), stage)


SCHEDULES = {**pipeline_parallel.SCHEDULES, "interleaved": interleaved, "interleaved_zb": interleaved_zero_bubble}


def choose_schedule(pp_engine: str, virtual_stages: int, pp_size: int):
    """The schedule of this name for so many chunks per rank: (stage, num_stages, num_microbatches) -> actions.

    Raises UserError where they do not belong together.
    """
    if virtual_stages > 1 and pp_size == 1:
        raise UserError(f"--virtual_stages {virtual_stages} divides the stages of a pipeline: use --pp_size 2 or more")
    if pp_size == 1:
        return SCHEDULES["1f1b"]  # a single stage waits for no other
    if (virtual_stages > 1) != pp_engine.startswith("interleaved"):
        raise UserError(f"--virtual_stages {virtual_stages} with --pp_engine {pp_engine}: interleaved and "
                        "interleaved_zb run 2 or more virtual stages per rank, the other schedules run 1")
    schedule = SCHEDULES[pp_engine]
    return functools.partial(schedule, num_chunks=virtual_stages) if virtual_stages > 1 else schedule
