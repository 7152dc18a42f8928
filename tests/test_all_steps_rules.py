"""The steps keep the rules and budgets that `tools/steps.py check` knows."""

import steps


def test_steps_keep_the_rules(capsys):
    assert steps.main(["check"]) == 0, capsys.readouterr()
