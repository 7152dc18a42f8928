"""Dropout in step 9: tp ranks draw equal masks for the activations that all of them hold, other ranks other masks."""

import json

from lab.launch import MODELS, ROOT, fork

SCRIPT = ROOT / "tests" / "support" / "dropout_over_ranks.py"


def run(folder, ranks: int, what: str) -> list:
    fork(9, ranks, folder, what, script=SCRIPT, modules=MODELS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def test_masks_agree_over_tp_and_differ_elsewhere(tmp_path):
    """A mask of embeddings, and two of each decoder layer, a micro-batch; attention draws others, as many on each."""
    places = {tuple(result.pop("place")): result for result in run(tmp_path, 6, "stages")}
    assert places.keys() == {(dp, pp, tp) for dp, pp in ((0, 0), (0, 1), (1, 0)) for tp in (0, 1)}
    for (dp, pp, tp), result in places.items():
        assert result == places[dp, pp, 0], "tp ranks differ"
        assert len(result["gradients"]) >= 6
    masks = [places[place]["masks"] for place in ((0, 0, 0), (0, 1, 0), (1, 0, 0))]
    assert [len(drawn) for drawn in masks] == [2 * (1 + 2 * 1), 2 * 2 * 2, 2 * (1 + 2 * 3)]
    together = [mask for drawn in masks for mask in drawn]
    assert len(set(together)) == len(together) and "none" not in together
