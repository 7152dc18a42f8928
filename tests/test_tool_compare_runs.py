"""The same numbers in metrics.jsonl and in TensorBoard's files."""

import compare_runs
import pytest
from lab.launch import fork, metrics


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    flags = ["--num_hidden_layers", 1, "--seq_len", 16, "--max_tokens", 3 * 16 * 32, "--eval_every", 2, "--log_dir", folder]
    fork(3, 1, *flags, "--run_name", "run")
    return folder


def test_tensorboard_has_the_same_numbers(folder, capsys):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # a second call replaces the files of the first
        compare_runs.main([str(folder / "run"), "--out", str(folder / "board")])
    assert "tensorboard --logdir" in capsys.readouterr().out
    events = EventAccumulator(str(folder / "board" / "run"))
    events.Reload()
    recorded = metrics(folder, "run")
    for name in set(recorded[1]) - {"step"}:
        scalars = [(scalar.step, pytest.approx(scalar.value)) for scalar in events.Scalars(name)]
        assert scalars == [(row["step"], row[name]) for row in recorded if name in row], name
    assert "validation_loss" in recorded[1]


def test_a_line_that_a_full_disk_has_cut_is_left_out(folder, tmp_path):
    text = (folder / "run" / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(text[:-9])
    assert metrics(tmp_path.parent, tmp_path.name) == metrics(folder, "run")[:-1]


def test_a_run_is_never_overwritten(folder):
    before = (folder / "run" / "metrics.jsonl").read_text()
    with pytest.raises(SystemExit, match="would overwrite the run"):
        compare_runs.main([str(folder / "run"), "--out", str(folder)])
    assert (folder / "run" / "metrics.jsonl").read_text() == before
    with pytest.raises(SystemExit, match="holds no run"):
        compare_runs.main([str(folder)])
