"""Each figure that is drawn without a run is drawn."""

from maintain import make_figures


def test_drawn_figures(tmp_path):
    make_figures.main([*make_figures.DRAWN, "--out", str(tmp_path)])
    assert len(list(tmp_path.glob("figure_*.png"))) == len(make_figures.DRAWN) == 6
