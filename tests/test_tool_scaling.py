"""The scaling figure's own theory and bookkeeping, and one short run on 4 ranks that theory has to predict."""

import json

import pytest

from launch import STEPS
from scaling import GRIDS, MICRO_BATCH, SWEEPS, Case, bubble, draw, parse_bubbles, train
from scaling_rank import Probe


@pytest.mark.parametrize("engine", ["afab", "1f1b"])
def test_stages_alike_with_a_core_each_have_the_bubble_of_the_textbook(engine, monkeypatch):
    monkeypatch.setattr(Case, "flops", lambda case, stage: 1200)
    for p in (1, 2, 3, 4):
        for m in (1, 2, 4, 9):
            time, share = Case(pp=p, engine=engine, m=m).simulate(cores=p)
            assert time == pytest.approx((m + p - 1) * 3 * 1200) and share == pytest.approx(bubble(p, m)), (p, m)


def test_no_more_compute_at_once_than_there_are_cores():
    for case in SWEEPS["m"] + GRIDS:
        work = 3 * case.m * sum(case.flops(stage) for stage in range(case.pp))
        times = [case.simulate(cores)[0] for cores in (1, 2, 4)]
        assert times == sorted(times, reverse=True) and times[0] == pytest.approx(work), case
        bounds = [work / min(cores, case.pp * case.tp) for cores in (1, 2, 4)]
        assert all(time > 0.999 * bound for time, bound in zip(times, bounds)), case


def test_live_microbatches():
    found = {engine: [Case(pp=4, engine=engine, m=8).live_microbatches(stage) for stage in range(4)]
             for engine in ("afab", "1f1b")}
    assert found == {"afab": [8, 8, 8, 8], "1f1b": [4, 3, 2, 1]}
    assert [Case(pp=4, m=2).live_microbatches(stage) for stage in range(4)] == [2, 2, 2, 1]


def test_all_stages_together_are_the_model():
    for layers in (4, 7, 8):
        whole = Case(layers=layers)
        for p in (1, 2, 3, 4):
            case = whole._replace(pp=p)
            assert sum(case.num_layers(stage) for stage in range(p)) == layers
            assert sum(case.flops(stage) for stage in range(p)) == whole.flops(0)
            assert case.state_bytes() == whole.state_bytes() / p


def test_printed_bubbles_are_found_by_the_run_s_name():
    output = """step 5/5 | loss 6.2322
timeline: /tmp/x y/pp4_tp1_afab_m8_t128_l8/timeline_batch5_all.json
bubble: 41.1% measured, 27.3% ideal, that is (p-1)/(m+p-1) with p=4 stages and m=8 micro-batches
metrics: /tmp/x y/pp4_tp1_afab_m8_t128_l8/metrics.jsonl
timeline: runs/b/timeline_batch5_all.json
bubble: 7.0% measured, 5.9% ideal
"""
    assert parse_bubbles(output) == {"pp4_tp1_afab_m8_t128_l8": pytest.approx(0.411), "b": pytest.approx(0.07)}


def test_saved_storages_count_once_and_until_backward_lets_go():
    import torch

    probe, weight = Probe(), torch.nn.Parameter(torch.ones(10, 10))
    probe.parameters = {weight.untyped_storage().data_ptr()}
    x = torch.ones(10, 10, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(probe.pack, lambda kept: kept):
        y = (x * x) @ weight  # saves x, twice, and the product
    assert (probe.now, probe.found["saved"]) == (800, 800)
    y.sum().backward()
    assert (probe.now, probe.found["saved"]) == (0, 800) and x.grad.eq(20).all()


def test_flags_are_those_of_train(tmp_path):
    words = Case(pp=2).flags(str(tmp_path), 5)
    text = (STEPS["8"] / "train.py").read_text()
    assert all(f'"{word}"' in text for word in words[::2])
    assert words[words.index("--max_tokens") + 1] == str(5 * MICRO_BATCH * 4 * 128)


def test_figure_of_what_was_measured(tmp_path):
    results = {}
    for case in [case for sweep in SWEEPS.values() for case in sweep] + GRIDS:
        rank = {"live": 1, "saved": 2e6, "state": 3e6, "resident": 9e6}
        results[case.name] = {"step_seconds": [1.0, 2.0, 4.0], "bubble": [0.5], "ranks": [rank] * case.pp * case.tp}
    draw(json.loads(json.dumps(results)), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 50_000


def test_four_stages_hold_what_theory_says(tmp_path):
    results, cases = {}, [Case(pp=4, engine=engine, m=5, seq_len=32) for engine in ("1f1b", "afab")]
    train(cases, tmp_path, True, results)
    for case in cases:
        ranks = results[case.name]["ranks"]
        assert [rank["live"] for rank in ranks] == [case.live_microbatches(stage) for stage in range(4)]
        assert sum(rank["state"] for rank in ranks) == 4 * case.state_bytes()
        assert [rank["saved"] for rank in ranks] == pytest.approx([case.saved_bytes(s) for s in range(4)], rel=0.02)
        assert all(rank["resident"] > rank["state"] for rank in ranks)
