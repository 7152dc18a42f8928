"""Numbers in the pages that a formula gives: computed again, to the digits that are written."""

import re
import textwrap

import pytest
import torch
from lab.launch import ROOT, modules_of

with modules_of(9):
    from sizes.data_sheets import PRESETS, kept_by_layer

SEVEN = PRESETS["llama-2-7b"]
T, MB, GB = 2048, 1e6, 1e9
KEPT = kept_by_layer(SEVEN, 1, 2, is_gpu=True)
DROPPED = 2 * SEVEN.hidden * 2 + 2 * SEVEN.width * 2  # the norms' outputs; silu and the product, in bfloat16


def bubble(p: int, m: int, halves: int = 1) -> float:
    return 100 * (p - 1) / (halves * m + p - 1)


def idle(kind: str, p: int, forward: int = 1, backward: int = 2, weight: int = 1) -> int:
    return {"1f1b": (p - 1) * (forward + backward), "dual": (p // 2 - 1) * (forward + 2 * backward - 3 * weight)}[kind]


STEP = "step8_pipeline_parallel_1f1b"
CLAIMS = [  # page, what stands around the number, what it has to be
    (STEP, r"for a layer of the 7B Llama ([\d.]+)\sMB", T * SEVEN.hidden * 2 / MB),
    (STEP, r"instead of ([\d.]+)\s+MB, and during", T * sum(KEPT.values()) / MB),
    (STEP, r"the normalized input, too: ([\d.]+)\sMB", 2 * T * (
        6 * SEVEN.hidden + 4 * SEVEN.heads * SEVEN.head_dim + 4 * SEVEN.width + 2 + SEVEN.heads) / MB),
    (STEP, r"the product\s+([\d.]+) of the 315 MB remain", T * (sum(KEPT.values()) - DROPPED) / MB),
    (STEP, r"x 315\sMB = ([\d.]+) GB\. With 8", 4 * 8 * 0.315),
    (STEP, r"falls from 3/11 = (\d+)\s%", bubble(4, 8)),
    (STEP, r"to 3/19 = (\d+)\s%", bubble(4, 16)),
    ("beyond", r"\(p-1\)/\(5p-1\): (\d+)\s%", bubble(4, 16)),
    ("beyond", r"for p = 4, (\d+)\s% for p = 8", bubble(8, 32)),
    ("beyond", r"about a\s+third \((\d+)\s%\)", bubble(4, 16, halves=3)),
    ("beyond", r"16 %.* For (5)\s% m has to be 19 \(p-1\)", bubble(4, 19 * 3)),
    ("beyond/step11_virtual_stages", r"counts (\d+) idle units", idle("dual", 8)),
    ("beyond/step11_virtual_stages", r"has\s\(p - 1\)\(F \+ B\) = (\d+)", idle("1f1b", 8)),
    ("beyond/step17_local_steps", r"2 · 7/8 · 4 GB = (\d+) GB", 2 * 7 / 8 * 4),
    ("beyond/step18_muon", r"up to 3\.4445\^5 = (\d+)", 3.4445**5),
    ("step2_process_group_manager", r"the time of (\d+) S, where", 2 * 3),
    ("step2_process_group_manager", r"a ring takes ([\d.]+) S", 2 * 7 / 8),
    ("step2_process_group_manager", r"115 ms: ([\d.]+) GB/s", 2 * 3 / 4 * 40e6 / 0.115 / GB),
]


@pytest.mark.parametrize("page, around, value", CLAIMS, ids=[f"{page}-{value:.4g}" for page, _, value in CLAIMS])
def test_a_number_is_what_its_formula_gives(page, around, value):
    [written] = re.findall(around, (ROOT / page / "README.md").read_text(encoding="utf-8"), re.S)
    digits = len(written.partition(".")[2])
    assert f"{value:.{digits}f}" == written


@pytest.mark.parametrize("n", [2, 4])
def test_the_noise_scale_of_the_page_is_right_on_average_for_any_number_of_replicas(n):
    """Gradients of known noise: both estimates are unbiased, and the noise is the replicas' variance, exactly."""
    lines = re.findall(r"^ +(?:noise|signal) = .*", (ROOT / "docs" / "BATCH_SIZE.md").read_text(encoding="utf-8"), re.M)
    generator, trials, tokens = torch.Generator().manual_seed(n), 20000, 16
    mean, deviation = torch.randn(2, 50, generator=generator, dtype=torch.float64)  # of one token's gradient
    replicas = mean + deviation * tokens**-0.5 * torch.randn(trials, n, 50, generator=generator, dtype=torch.float64)
    given = dict(n=n, tokens=tokens, own=replicas.square().sum(2).mean(1), large=replicas.mean(1).square().sum(1))
    exec(textwrap.dedent("\n".join(lines)), given)
    torch.testing.assert_close(given["noise"], tokens * replicas.var(1).sum(1), rtol=1e-9, atol=1e-9)
    for name, right in (("noise", deviation), ("signal", mean)):
        error = given[name].mean() - right.square().sum()
        assert abs(error) < 4 * given[name].std() * trials**-0.5, (name, error)
