"""The real steps keep the rules and budgets that `tools/steps.py check` knows."""

from launch import ROOT
from made_up_steps import run  # noqa: F401, a fixture


def test_real_steps_keep_the_rules(run):  # noqa: F811
    code, out = run("check", root=ROOT)
    assert code == 0, out
