"""Wrong and right answers to the exercises of step 18; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "newton_schulz": Versions(
        wrong=[
            Wrong("the norm stays", "x = x / x.norm().clamp(min=1e-7)", "x = x / 1.0", "a matrix"),
            Wrong("a tall matrix stays transposed", "return x.T if matrix.size(0) > matrix.size(1) else x", "return x",
                  "has shape"),
            Wrong("one step too few", "range(5)", "range(4)", "numbers are wrong"),
        ]),
    "owners": Versions(
        wrong=[
            Wrong("the smallest pieces first", "key=lambda i: -work[i]", "key=lambda i: work[i]", "the slowest rank"),
            Wrong("shares are forgotten", "(load[rank] + work[i]) / shares[rank]", "load[rank]", "shares [4, 2, 1]"),
            Wrong("in turns", "min(range(len(shares)), key=lambda rank: (load[rank] + work[i]) / shares[rank])",
                  "i % len(shares)", "the slowest rank"),
        ]),
    "rounds": Versions(
        wrong=[
            Wrong("all matrices are put together by rows", "torch.cat(gathered, dims[grid.tp_rank])",
                  "torch.cat(gathered, 0)", "matrices over"),
            Wrong("each rank iterates its own part", "orthogonalize(whole).chunk(len(parts), dim)",
                  "[orthogonalize(part) for part in gathered]", "numbers are wrong"),
            Wrong("parts of columns are sent as they lie", "results = [part.contiguous() for part in ",
                  "results = [part for part in ", "contiguous"),
        ]),
}
