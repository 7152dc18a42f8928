"""Random faults in an elastic run on three hosts of the test bed: it goes on, or one clear line says how.

Each run draws its layout and four faults from its seed. FAULT_SEED=17 replays one run, FAULTS=60 makes sixty faults.
"""

import os

import pytest
from lab.launch import ROOT, fork, metrics
from maintain.bed import bed, testbed
from support.checkpoint_runs import write_model
from support.faults import FLAGS, LAYOUTS, FaultyRun, draw

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__)]
A_RUN = 4  # faults
COUNT = int(os.environ.get("FAULTS", 8))
FIRST = int(os.environ.get("FIRST_SEED", 1))
SEEDS = [int(os.environ["FAULT_SEED"])] if "FAULT_SEED" in os.environ else range(FIRST, FIRST + -(-COUNT // A_RUN))
ROUNDED = 1e-6  # the norms of transformers' Llama round to float32, which makes up to 1e-8 of any 1e-16
TEXT = "It was the best of times, it was the worst of times; it was the age of wisdom. " * 60


@pytest.fixture(scope="module")
def inputs(bed, tmp_path_factory):
    """A folder, of which each host has a copy, with a corpus, and with a model that has weights."""
    folder = tmp_path_factory.mktemp("hosts")
    write_model(folder / "model", "llama", "float32", vocab_size=1024, hidden_size=32, intermediate_size=48,
                num_hidden_layers=4, num_attention_heads=4, initializer_range=0.1)
    (folder / "corpus").mkdir()
    for i in range(4):
        (folder / "corpus" / f"{i}.txt").write_text(f"{i}. {TEXT[i:]}")
    testbed("own", folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """undisturbed(layout, sources, steps): the rows of one process, computed again only where more are asked for."""
    known = {}

    def rows(layout: str, sources: list, steps: int) -> list[dict]:
        others = LAYOUTS[layout][1]
        key = tuple(map(str, others + sources))
        if len(known.get(key, [])) < steps:
            folder = tmp_path_factory.mktemp("one")
            fork(9, 1, *FLAGS, *others, *sources, "--num_microbatches", 6, "--max_steps", steps + 200, "--equal_shares",
                 "--run_name", "one", "--log_dir", folder, "--checkpoint_dir", folder / "checkpoints",
                 script=ROOT / "cluster" / "train_distributed.py", modules=["peft"])
            known[key] = metrics(folder, "one")
        return known[key][:steps]

    return rows


@pytest.mark.parametrize("seed", SEEDS)
def test_random_faults(inputs, undisturbed, tmp_path, seed):
    plan = draw(seed, A_RUN)
    print(f"FAULT_SEED={seed}: {plan.layout}{', detached' * plan.is_detached}")
    sources = ["--dataset_name", inputs / "corpus"]
    sources += ["--model_name", inputs / "model"] if plan.layout == "adapters" else []
    run = FaultyRun(tmp_path, f"seed-{seed}", plan, sources)
    try:
        run.suffer()
        run.stop()
        found = run.rows()
    finally:
        print(*run.log, sep="\n")
        run.clear()
    everyone = {row["step"]: row for rows in found.values() for row in rows}  # one with full disks may lack some
    longest = [everyone[step] for step in sorted(everyone)]
    expected = undisturbed(plan.layout, sources, longest[-1]["step"])
    assert [row["step"] for row in longest] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm"):
        apart = {row["step"]: abs(row[key] - other[key]) for row, other in zip(longest, expected)}
        assert max(apart.values()) <= (ROUNDED if plan.layout == "adapters" else 1e-9), (key, apart)
    print(f"{len(longest)} steps as without a fault, in all {sum(map(len, found.values()))} rows on {len(found)} hosts")
