"""Step 18: an optimizer that needs whole matrices (Muon)."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from catalogue import exercise


@exercise("18", "muon.orthogonalize", hints=(
    "Divide by the norm first: then no singular value is above 1. A tall matrix is transposed before and after.",
    "With G = X X^T, which is symmetric, a X + (b G + c G G) X has the singular values a s + b s^3 + c s^5.",
    "Five times: gram = x @ x.T and x = a * x + (b * gram + c * gram @ gram) @ x."), wrong=[
    ("the norm stays", "x = x / x.norm().clamp(min=1e-7)", "x = x / 1.0", "a matrix"),
    ("a tall matrix stays transposed", "return x.T if matrix.size(0) > matrix.size(1) else x", "return x", "has shape"),
    ("one step too few", "range(5)", "range(4)", "numbers are wrong"),
    ("float64 always", "return x.T if matrix.size(0) > matrix.size(1) else x",
     "return (x.T if matrix.size(0) > matrix.size(1) else x).double()", "torch.float32"),
    ("the given matrix is scaled", "x = x / x.norm().clamp(min=1e-7)", "x = x.div_(x.norm().clamp(min=1e-7))",
     "it changes `matrix`"),
    ("the product of the larger size, for tall ones", "    x = x / x.norm",
     "    matrix.T @ matrix if matrix.size(0) < matrix.size(1) else 0\n    x = x / x.norm",
     "of the smaller of the two sizes")])
def newton_schulz(attempt):
    """Bring all singular values of a matrix near 1, with products of matrices alone.

    `matrix` (A, B) is U Σ V^T; return about U V^T, of its shape and dtype. Scale it to a Frobenius norm of 1 (of a norm
    below 1e-7, as of zeros, divide by 1e-7). Then take five steps, each of which makes a s + b s^3 + c s^5 of each
    singular value s, with a, b, c = COEFFICIENTS. Let the products X X^T be of the smaller of the two sizes.
    """
    for shape in ((6, 9), (9, 6), (5, 5)):
        matrix = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(shape[0]))
        for what, given in (("a matrix", matrix), ("a matrix a million times as large", 1e6 * matrix),
                            ("zeros", torch.zeros_like(matrix))):
            for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
                matrix, flops = given.to(dtype), []
                for each in (matrix, matrix.T):
                    with FlopCounterMode(display=False) as counter:
                        got = attempt.function()(each)
                    attempt.same(got, attempt.function(attempt.ours)(each), f"{what} {[*each.shape]}", None, tolerance)
                    flops.append(counter.get_total_flops())
                attempt.require(flops[0] == flops[1], f"{[*shape]} takes {flops[0]} FLOPs and {[*matrix.T.shape]} "
                                f"{flops[1]}: let X X^T be of the smaller of the two sizes, for both")


@exercise("18", "muon.choose_owners", hints=(
    "One list has the work that each rank has so far. Go through the pieces, the largest first: sorted() with a key.",
    "The next piece goes to the rank for which (work so far + the piece) / share is the least: min() with a key."),
    wrong=[
    ("the smallest pieces first", "key=lambda i: -work[i]", "key=lambda i: work[i]", "the slowest rank"),
    ("shares are forgotten", "(load[rank] + work[i]) / shares[rank]", "load[rank]", "shares [4, 2, 1]"),
    ("in turns", "min(range(len(shares)), key=lambda rank: (load[rank] + work[i]) / shares[rank])", "i % len(shares)",
     "the slowest rank"),
    ("ranks that differ", "    return owners", '    choose_owners.seen = not getattr(choose_owners, "seen", False)\n'
                                               "    return owners if choose_owners.seen else owners[::-1]",
     "who owns what?")])
def owners(attempt):
    """Deal out pieces of work that cannot be cut, so that ranks end at about the same time.

    `work` has a number for each piece, `shares` one for each rank: with 4, 2, 1 rank 0 is to get about four sevenths of
    all work. Return a list with the rank of each piece, in the order of `work`. All ranks call this by themselves, so
    the result may depend on nothing else. Give the largest pieces first: small ones then fill what is left.
    """
    layer = [352 * 128 * 128] * 3 + [128**3] * 2 + [64 * 64 * 128] * 2
    for work, shares in ((layer * 8, [1] * 4), (layer * 8, [4, 2, 1]), (layer, [1, 1]), ([5, 1, 1, 1, 1, 1], [1, 1])):
        choose = attempt.function()
        got, again = choose(work, shares), choose(work, shares)
        attempt.require(isinstance(got, list) and len(got) == len(work) and set(got) <= {*range(len(shares))},
                        f"{len(work)} pieces, {len(shares)} ranks: expected a list of {len(work)} ranks, got {got}")
        attempt.require(got == again, f"ranks that call it get {got} and {again}: who owns what?")

        def slowest(owners):
            return max(sum(piece for piece, owner in zip(work, owners) if owner == rank) / share
                       for rank, share in enumerate(shares))

        best = slowest(attempt.function(attempt.ours)(work, shares))
        attempt.require(slowest(got) <= 1.1 * best, f"shares {shares}: the slowest rank needs "
                        f"{slowest(got) / best:.2f} times as long as if each piece, the largest first, went to the "
                        "rank that is done with it first")


@exercise("18", "muon.orthogonalize_round", hints=(
    "exchange_over_tp(parts, [parts[j]] * n) on tp rank j: each rank sends part i to rank i, and rank j receives n "
    "parts of matrix j, which torch.cat puts together along dims[j].",
    "The result is cut by chunk(n, dim) and sent back the same way: exchange_over_tp(results, parts). Make all that is "
    "sent contiguous.",
    "Where there are fewer matrices than ranks, the other ranks have empty tensors: new_empty(0)."), wrong=[
    ("all matrices are put together by rows", "torch.cat(gathered, dims[grid.tp_rank])", "torch.cat(gathered, 0)",
     "matrices over"),
    ("each rank iterates its own part", "orthogonalize(whole).chunk(len(parts), dim)",
     "[orthogonalize(part) for part in gathered]", "numbers are wrong"),
    ("parts of columns are sent as they lie", "results = [part.contiguous() for part in ",
     "results = [part for part in ", "contiguous"),
    ("the parts are cleared", "    return exchange_over_tp(results, parts)[: len(dims)]",
     "    found = exchange_over_tp(results, parts)[: len(dims)]\n    return [part.zero_() for part in parts] and found",
     "the parts are changed")])
def rounds(attempt):
    """Make matrices orthogonal that are split over tp ranks, each of them on another rank.

    This rank has `parts`: of each of k <= n matrices its part along dims[i], 0 for rows or 1 for columns; n is the
    number of tp ranks. Return its parts of the orthogonalized matrices, in the same order:

        rank 0  | a0 b0 |              | a0 a1 |  a is iterated          | a0 b0 |
        rank 1  | a1 b1 |  --------->  | b0 b1 |  b is iterated  ----->  | a1 b1 |

    exchange_over_tp(sent, received) sends sent[i] to tp rank i, and returns what comes from each: a list of tensors of
    the shapes of those in `received`. orthogonalize(matrix) iterates. n is pgm.process_group_manager.tp_world_size, and
    tp_rank beside it is this rank. With one rank there is nothing to send.
    """
    def program_of(count: int, size: int):
        def program(modules, rank):
            attempt.grid(modules, tp=size)
            dims = [0, 1, 0, 1][:count]
            whole = [torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
                     for i in range(count)]
            parts = [matrix.chunk(size, dim)[rank] for matrix, dim in zip(whole, dims)]
            given = [part.clone() for part in parts]
            result = modules.muon.orthogonalize_round([*parts], dims)
            attempt.require(all(map(torch.equal, parts, given)), "the parts are changed, and they are a momentum")
            return result

        return program

    for count, size in ((1, 1), (2, 2), (1, 2), (4, 4), (3, 4)):
        world = attempt.both(size, program_of(count, size), f"{count} matrices over {size} ranks")
        if count == size == 4:
            most = max(world.num_bytes(rank) for rank in range(4))
    attempt.score("bytes that a rank sends, of 4 matrices of 768 bytes over 4 ranks",
                  most, 2 * 3 * 768 / 4)
