"""Wrong and right answers to the exercises of step 18."""

from versions import Versions, Wrong

VERSIONS = {
    "newton_schulz": Versions(
        wrong=[
            Wrong("the norm stays", "x = x / x.norm().clamp(min=1e-7)", "x = x / 1.0", "a matrix"),
            Wrong("a tall matrix stays transposed", "return x.T if matrix.size(0) > matrix.size(1) else x", "return x",
                  "has shape"),
            Wrong("one step too few", "range(5)", "range(4)", "numbers are wrong"),
            Wrong("float64 always", "return x.T if matrix.size(0) > matrix.size(1) else x",
                  "return (x.T if matrix.size(0) > matrix.size(1) else x).double()", "torch.float32"),
            Wrong("the given matrix is scaled", "x = x / x.norm().clamp(min=1e-7)",
                  "x = x.div_(x.norm().clamp(min=1e-7))", "it changes `matrix`"),
            Wrong("the product of the larger size, for tall ones", "    x = x / x.norm",
                  "    matrix.T @ matrix if matrix.size(0) < matrix.size(1) else 0\n    x = x / x.norm",
                  "of the smaller of the two sizes"),
        ]),
    "owners": Versions(
        wrong=[
            Wrong("the smallest pieces first", "key=lambda i: -work[i]", "key=lambda i: work[i]", "the slowest rank"),
            Wrong("shares are forgotten", "(load[rank] + work[i]) / shares[rank]", "load[rank]", "shares [4, 2, 1]"),
            Wrong("in turns", "min(range(len(shares)), key=lambda rank: (load[rank] + work[i]) / shares[rank])",
                  "i % len(shares)", "the slowest rank"),
            Wrong("ranks that differ", "    return owners", "    choose_owners.seen = not getattr(choose_owners, "
                  "\"seen\", False)\n    return owners if choose_owners.seen else owners[::-1]", "who owns what?"),
        ]),
    "rounds": Versions(
        wrong=[
            Wrong("all matrices are put together by rows", "torch.cat(gathered, dims[grid.tp_rank])",
                  "torch.cat(gathered, 0)", "matrices over"),
            Wrong("each rank iterates its own part", "orthogonalize(whole).chunk(len(parts), dim)",
                  "[orthogonalize(part) for part in gathered]", "numbers are wrong"),
            Wrong("parts of columns are sent as they lie", "results = [part.contiguous() for part in ",
                  "results = [part for part in ", "contiguous"),
            Wrong("the parts are cleared", "    return exchange_over_tp(results, parts)[: len(dims)]",
                  "    found = exchange_over_tp(results, parts)[: len(dims)]\n    return [part.zero_() for part in "
                  "parts] and found", "the parts are changed"),
        ]),
}
