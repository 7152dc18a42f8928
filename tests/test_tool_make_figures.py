"""What the figures say: the bubble and the live micro-batches of a trace, and that each drawn one is drawn."""

import json

import figures_measured
import make_figures
import pytest


@pytest.fixture
def trace(tmp_path):
    """Two stages, two micro-batches: F0 F1 on both, then B0 B1; a forward takes 1 s, a backward 2 s."""
    starts = {0: {"forward": (0, 1), "backward": (5, 7)}, 1: {"forward": (1, 2), "backward": (3, 5)}}
    events = [{"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}: dp 0 pp {rank} tp 0"}}
              for rank in starts]
    events += [{"name": f"{kind} {i}", "cat": kind, "ph": "X", "pid": rank, "ts": start * 1e6,
                "dur": (1 if kind == "forward" else 2) * 1e6}
               for rank, kinds in starts.items() for kind, times in kinds.items() for i, start in enumerate(times)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_what_is_read_out_of_a_trace(trace, tmp_path):
    spans = figures_measured.read_trace(trace)
    assert {(span.rank, span.place) for span in spans} == {(0, (0, 0, 0)), (1, (0, 1, 0))}
    assert figures_measured.bubble_of(spans) == pytest.approx(1 - 12 / 18)
    assert figures_measured.alive(spans, 0) == ([0, 0, 1, 7, 9], [0, 1, 2, 1, 0])
    assert max(figures_measured.alive(spans, 1)[1]) == 2
    for draw, engines in ((figures_measured.timelines, figures_measured.SCHEDULES),
                          (figures_measured.activations, ("afab", "1f1b", "zb"))):
        draw(dict.fromkeys(engines, trace), tmp_path / "figure.png")
        assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_drawn_figures(tmp_path):
    make_figures.main([*make_figures.DRAWN, "--out", str(tmp_path)])
    assert len(list(tmp_path.glob("figure_*.png"))) == len(make_figures.DRAWN) == 5
