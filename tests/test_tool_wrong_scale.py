"""wrong_scale.py: the one line it changes, and two steps of both runs."""

import sys

import pytest
import wrong_scale
from launch import ROOT, STEPS


def test_it_takes_out_one_division_and_nothing_else():
    right = (STEPS["3"] / "train.py").read_text()
    changed = [(old.strip(), new.strip()) for old, new in zip(right.splitlines(),
                                                             wrong_scale.without_division(right).splitlines(),
                                                             strict=True) if old != new]
    assert [new for _, new in changed] == [
        'loss = cross_entropy(logits, batch["target_ids"])', "loss.backward()",
        "total_loss += loss.detach() / num_microbatches"]


@pytest.mark.parametrize("text, times", [("loss.backward()\n", 0), (2 * wrong_scale.RIGHT_TEXT, 2)])
def test_another_train_py_is_an_error(text, times):
    with pytest.raises(ValueError, match=f"step 3's train.py contains these lines {times} times, not once"):
        wrong_scale.without_division(text)


def test_the_norm_tells_and_the_loss_does_not(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["wrong_scale.py", "--steps", "2", "--figure", str(tmp_path / "figure.png")])
    found = []
    monkeypatch.setattr(wrong_scale, "draw", lambda runs, _: found.append(runs))
    wrong_scale.main()
    differences, ratios = wrong_scale.compare(found[0])
    assert differences[0] == 0 and differences[1] < 1e-4
    assert ratios == pytest.approx([8, 8], rel=1e-3)
    assert "8.00 times as large" in capsys.readouterr().out


def test_figure(tmp_path):
    rows = [{"loss": 7 - i, "grad_norm": 2.0 + i} for i in range(3)]
    wrong_scale.draw({wrong_scale.AS_IT_IS: rows, wrong_scale.WRONG: rows}, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_flag_the_figure_is_not_the_chapter_s(monkeypatch):
    rows, pictures = [{"loss": 7.0, "grad_norm": 2.0}], []
    monkeypatch.setattr(wrong_scale, "train", lambda *args: {wrong_scale.AS_IT_IS: rows, wrong_scale.WRONG: rows})
    monkeypatch.setattr(wrong_scale, "draw", lambda runs, picture: pictures.append(picture))
    monkeypatch.setattr(sys, "argv", ["wrong_scale.py"])
    wrong_scale.main()
    assert pictures == [ROOT / "runs" / "wrong_scale.png"]
