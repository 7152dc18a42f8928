"""Random faults in an elastic run on three hosts of the test bed: it goes on, or one clear line says how.

Each run draws its layout and four faults from its seed. FAULT_SEED=17 replays one run, FAULTS=60 makes sixty faults.
"""

import os
import random
import signal
import time

import pytest
from bed import NODES, bed, testbed
from checkpoint_runs import write_model
from faults import FILLER, FLAGS, LAYOUTS, FaultyRun, Plan, Steps, divide, draw, fill, kill_processes
from launch import ROOT, fork, metrics

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.usefixtures(bed.__name__)]
A_RUN = 4  # faults
COUNT = int(os.environ.get("FAULTS", 8))
FIRST = int(os.environ.get("FIRST_SEED", 1))
SEEDS = [int(os.environ["FAULT_SEED"])] if "FAULT_SEED" in os.environ else range(FIRST, FIRST + -(-COUNT // A_RUN))
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
    longest = max(found.values(), key=lambda rows: rows[-1]["step"] if rows else 0)
    expected = undisturbed(plan.layout, sources, longest[-1]["step"])
    assert [row["step"] for row in longest] == [row["step"] for row in expected]
    for key in ("loss", "grad_norm"):
        assert max(abs(a[key] - b[key]) for a, b in zip(longest, expected)) <= 1e-9
    print(f"{len(longest)} steps as without a fault, in all {sum(map(len, found.values()))} rows on {len(found)} hosts")


def test_two_parts_never_both_train(inputs, tmp_path):
    """One host against two, by a cable or by routes; a second cut may come while the first one is remade."""
    seed, cuts = int(os.environ.get("FAULT_SEED", 1)), int(os.environ.get("CUTS", 2))
    chance, steps = random.Random(seed), Steps()
    run = FaultyRun(tmp_path, "parts", Plan("shares", True, []), ["--dataset_name", inputs / "corpus"])
    try:
        for number in range(cuts):
            start = time.monotonic()
            assert steps.watch(60, lambda: len(sum(steps.since(start).values(), [])) > 10), run.report()
            steps.watch(chance.uniform(0, 0.5))
            alone, lasts = chance.choice(NODES), chance.choice([4, 15, 40])
            others = [node for node in NODES if node != alone]
            by_cable, again = chance.random() < 0.5, chance.random() < 0.3
            print(f"cut {number}: {alone} alone, {'cable' if by_cable else 'routes'}, {lasts} s, again {again}",
                  flush=True)
            marks = {node: len(steps.texts[node]) for node in NODES}
            cut_at = time.monotonic()
            testbed("cut", alone) if by_cable else divide([alone], others)
            if again:  # and mended for a moment, while the parts remake their groups
                steps.watch(chance.uniform(5, 8))
                testbed("join", alone) if by_cable else divide([alone], others, True)
                steps.watch(chance.uniform(0.2, 1.5))
                cut_at = time.monotonic()
                testbed("cut", alone) if by_cable else divide([alone], others)
            steps.watch(lasts)
            found, said = steps.since(cut_at + 0.3), {node: steps.texts[node][marks[node]:] for node in NODES}
            mine, theirs = (sum((found.get(node, []) for node in part), []) for part in ([alone], others))
            print(f"   steps afterwards: alone {len(mine)}, the other two {len(theirs)}; "
                  f"too few: {'too few:' in said[alone]}", flush=True)
            testbed("join", alone) if by_cable else divide([alone], others, True)
            assert not mine, run.report(said[alone][-3000:])
            assert lasts < 15 or theirs, run.report(said[others[0]][-3000:])
            assert lasts < 40 or said[alone].count("too few:") == 1, run.report(said[alone][-3000:])
            marks = {node: len(steps.texts[node]) for node in NODES}
            assert lasts < 15 or steps.watch(90, lambda: any(
                "3 ranks over" in steps.texts[node][marks[node]:] for node in NODES)), run.report()
        run.stop()
    finally:
        run.clear()


def test_two_hosts_that_do_not_reach_each_other(inputs, tmp_path):
    """The third one reaches both. The run goes on with one of them, and again with both when they can."""
    run, steps = FaultyRun(tmp_path, "pair", Plan("shares", True, []), ["--dataset_name", inputs / "corpus"]), Steps()
    try:
        start = time.monotonic()
        assert steps.watch(60, lambda: len(sum(steps.since(start).values(), [])) > 10), run.report()
        divide(["node1"], ["node2"])
        steps.watch(12)
        start = time.monotonic()
        assert steps.watch(60, lambda: len(sum(steps.since(start).values(), [])) > 100), run.report()
        assert steps.texts["node0"].count("do not reach each other") == 1, run.report()
        divide(["node1"], ["node2"], True)
        mark = len(steps.texts["node0"])
        assert steps.watch(90, lambda: "3 ranks over" in steps.texts["node0"][mark:]), run.report()
        run.stop()
    finally:
        run.clear()


def test_a_host_comes_back_with_a_full_disk(inputs, tmp_path):
    """It says so and stays out, and the others train, one of them with a full disk of its own. Once there is room, it
    takes part."""
    run, steps = FaultyRun(tmp_path, "full", Plan("shares", True, []), ["--dataset_name", inputs / "corpus"]), Steps()
    try:
        start = time.monotonic()
        assert steps.watch(60, lambda: len(sum(steps.since(start).values(), [])) > 10), run.report()
        fill("node1")
        kill_processes("node2", "train_distributed.py")
        fill("node2")
        assert steps.watch(60, lambda: "error: " in steps.texts["node2"]), run.report()
        start = time.monotonic()
        assert steps.watch(60, lambda: len(sum(steps.since(start).values(), [])) > 10), run.report()
        testbed("exec", "node2", "rm", "-f", FILLER)
        mark = len(steps.texts["node0"])
        assert steps.watch(60, lambda: "3 ranks over" in steps.texts["node0"][mark:]), run.report()
        run.stop()
    finally:
        run.clear()


def test_a_process_that_alone_is_told_to_end_comes_back(inputs, tmp_path):
    """Others go on, so it is not the end of the run: neither its agent nor the launcher may take it for that."""
    run, steps = FaultyRun(tmp_path, "told", Plan("shares", True, []), ["--dataset_name", inputs / "corpus"]), Steps()
    try:
        start = time.monotonic()
        assert steps.watch(60, lambda: len(sum(steps.since(start).values(), [])) > 10), run.report()
        marks = {node: len(steps.texts[node]) for node in NODES}
        kill_processes("node1", "train_distributed.py", signal.SIGTERM)
        assert steps.watch(60, lambda: any("stopped after step" in steps.texts[node][marks[node]:] for node in NODES))
        assert steps.watch(90, lambda: any(
            "3 ranks over" in steps.texts[node][marks[node]:] for node in NODES)), run.report()
        start = time.monotonic()
        assert steps.watch(60, lambda: len(sum(steps.since(start).values(), [])) > 10), run.report()
        run.stop()
    finally:
        run.clear()
