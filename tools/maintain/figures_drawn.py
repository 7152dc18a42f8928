"""Figures that need no run: the grid of ranks, the collectives, how tensors are split, who computes which scores in
ring attention. See make_figures.py.
"""

import types

import matplotlib.patches as patches
from matplotlib.figure import Figure

from lab.launch import modules_of
from lab.picture import GROUND, INK

FAINT = "#8a8a8a"
RANKS = ["#4477aa", "#ee6677", "#228833", "#ccbb44"]  # a colour for each rank's data
LIGHT = ["#c7d8e8", "#f9cfd4", "#bfe0c4", "#efe8bd"]  # the same, as a background


def canvas(width: float, height: float, columns: int = 1, rows: int = 1, bare: bool = True, **options):
    """A figure on an opaque light ground, which is legible on dark pages, too; bare axes are in inches if alone."""
    figure = Figure(figsize=(width, height), dpi=150, facecolor=GROUND, layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    for one in axes.flat:
        one.set_facecolor(GROUND)
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(labelsize=11, colors=INK)
        if bare:
            one.set_axis_off()
    return figure, axes


def box(axes, x: float, y: float, width: float, height: float, text: str, colour: str, size: float = 12,
        edge: str = INK) -> None:
    axes.add_patch(patches.FancyBboxPatch((x, y), width, height, boxstyle="round,pad=0,rounding_size=0.08",
                                          facecolor=colour, edgecolor=edge, linewidth=1))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, color=INK)


def arrow(axes, start: tuple, end: tuple, colour: str = INK, style: str = "-|>", bend: float = 0.0) -> None:
    axes.add_patch(patches.FancyArrowPatch(start, end, arrowstyle=style, mutation_scale=14, color=colour, linewidth=1.6,
                                           connectionstyle=f"arc3,rad={bend}"))


def operator(axes, x: float, y: float, letter: str) -> None:
    """One of the conjugate operators f and g."""
    axes.add_patch(patches.Circle((x, y), 0.26, facecolor="#ffffff", edgecolor=INK, linewidth=1.4, zorder=3))
    axes.text(x, y, letter, ha="center", va="center", fontsize=15, style="italic", color=INK, zorder=4)


def grid(picture) -> None:
    """Eight ranks as 2 x 2 x 2, and the group of rank 5 along each axis."""
    figure, axes = canvas(10, 4.6, 3)
    groups = {"tp group of rank 5: [4, 5]": {4, 5}, "pp group of rank 5: [5, 7]": {5, 7},
              "dp group of rank 5: [1, 5]": {1, 5}}
    whys = ["shares each weight matrix:\nmost messages, so its ranks are neighbours",
            "shares the layers, stage by stage:\none message to the next stage",
            "shares the samples of a step:\naverages gradients once a step"]
    for one, (title, members), why, colour in zip(axes.flat, groups.items(), whys, LIGHT):
        for rank in range(8):
            dp, pp, tp = rank // 4, rank // 2 % 2, rank % 2
            box(one, 1.25 * tp, 3.4 - 2.2 * dp - 0.85 * pp, 1.05, 0.65, f"rank {rank}",
                colour if rank in members else "#f2f2f0", 12, INK if rank in members else "#bbbbbb")
        for dp in range(2):
            one.text(-0.15, 3.3 - 2.2 * dp, f"dp {dp}", ha="right", va="center", fontsize=12, color=INK)
            for pp in range(2):
                one.text(2.42, 3.72 - 2.2 * dp - 0.85 * pp, f"pp {pp}", va="center", fontsize=12, color=FAINT)
        for tp in range(2):
            one.text(0.52 + 1.25 * tp, 4.2, f"tp {tp}", ha="center", fontsize=12, color=FAINT)
        one.set_title(title, fontsize=13, color=INK, weight="bold")
        one.text(1.15, -0.25, why, ha="center", va="top", fontsize=11.5, color=INK)
        one.set(xlim=(-0.8, 3.1), ylim=(-1.1, 4.5))
    figure.savefig(picture)


def collectives(picture) -> None:
    """Three ranks before and after each of six operations."""
    figure, axes = canvas(10, 7.4, 3, 2)
    parts = [["a0", "a1", "a2"], ["b0", "b1", "b2"], ["c0", "c1", "c2"]]
    total = ["a0+b0+c0", "a1+b1+c1", "a2+b2+c2"]
    cases = {
        "broadcast from rank 0": ([["a"], [""], [""]], [["a"], ["a"], ["a"]]),
        "all-reduce (sum)": ([["a"], ["b"], ["c"]], [["a+b+c"]] * 3),
        "all-gather": ([["a"], ["b"], ["c"]], [["a", "b", "c"]] * 3),
        "reduce-scatter (sum)": (parts, [[part] for part in total]),
        "all-to-all": (parts, [["a0", "b0", "c0"], ["a1", "b1", "c1"], ["a2", "b2", "c2"]]),
        "send, recv (point to point)": ([["a"], [""], [""]], [["a"], ["a"], [""]]),
    }
    for one, (title, (before, after)) in zip(axes.flat, cases.items()):
        one.set_title(title, fontsize=13.5, color=INK, weight="bold")
        for rank in range(3):
            y = 2.6 - rank * 1.1
            one.text(-0.15, y + 0.35, f"rank {rank}", ha="right", va="center", fontsize=11.5, color=INK)
            for x, cells in ((0, before[rank]), (2.75, after[rank])):
                width = 1.8 / len(cells)
                for k, cell in enumerate(cells):
                    letters = [letter for letter in "abc" if letter in cell]
                    mixed = "#e3d4ec" if letters else "#f2f2f0"
                    colour = LIGHT["abc".index(letters[0])] if len(letters) == 1 else mixed
                    box(one, x + k * width, y, width, 0.7, cell, colour, 11 if len(cell) < 9 else 10)
            arrow(one, (1.9, y + 0.35), (2.65, y + 0.35), FAINT)
        one.text(0.9, -0.05, "before", ha="center", fontsize=11.5, color=FAINT)
        one.text(3.65, -0.05, "after", ha="center", fontsize=11.5, color=FAINT)
        one.set(xlim=(-0.95, 4.65), ylim=(-0.3, 3.45))
    figure.savefig(picture)


def column_row(picture) -> None:
    """An MLP over two ranks: columns of the first matrix, rows of the second, f in front and g behind."""
    figure, axes = canvas(10, 4.9)
    one = axes[0, 0]
    for rank, y in enumerate((3.15, 0.55)):
        colour = LIGHT[rank]
        one.text(2.45, y + 1.6, f"rank {rank}", fontsize=13, weight="bold", color=RANKS[rank])
        for x, name, shape in ((2.45, f"A{rank}", "(D, I/2)"), (6.35, f"B{rank}", "(I/2, D)")):
            box(one, x, y + 0.15, 1.3, 1.3, f"{name}\n{shape}", colour, 12)
        box(one, 4.35, y + 0.15, 1.4, 1.3, f"act(x A{rank})\n(B, T, I/2)", "#f2f2f0", 12)
        box(one, 8.25, y + 0.15, 1.4, 1.3, f"partial\nsum {rank}\n(B, T, D)", "#f2f2f0", 12)
        for start, end in ((3.75, 4.35), (5.75, 6.35), (7.65, 8.25)):
            arrow(one, (start, y + 0.8), (end, y + 0.8))
        arrow(one, (1.83, 2.65), (2.42, y + 0.8))
        arrow(one, (9.68, y + 0.8), (10.28, 2.65 + 0.25 * (1 - 2 * rank)))
    box(one, 0.0, 2.2, 1.2, 0.9, "x\n(B, T, D)", "#f2f2f0", 12)
    box(one, 10.9, 2.2, 1.2, 0.9, "y\n(B, T, D)", "#f2f2f0", 12)
    for x, text in ((1.57, "f"), (10.5, "g")):
        one.plot((x, x - 0.4 if text == "f" else x + 0.4), (2.65, 2.65), color=INK, linewidth=1.6, zorder=0)
        operator(one, x, 2.65, text)
    one.text(4.4, 2.65, "columns of A are split:\nno message is needed", ha="center", va="center", fontsize=12,
             color="#666666")
    one.text(7.65, 2.65, "rows of B are split:\na sum is left to do", ha="center", va="center", fontsize=12,
             color="#666666")
    lines = ("f   forward: nothing; backward: all-reduce of the gradient of x",
             "g   forward: all-reduce of the partial sums; backward: nothing")
    for line, y in zip(lines, (0.1, -0.35)):
        one.text(2.45, y, line, fontsize=12.5, color=INK)
    one.set(xlim=(-0.1, 12.2), ylim=(-0.5, 5.2), aspect="equal")
    figure.savefig(picture)


def sequence_parallel(picture) -> None:
    """An attention block over two ranks: which tokens (rows) and which columns each rank holds at each point."""
    figure, axes = canvas(10, 4.3)
    one, high, wide, apart = axes[0, 0], 1.5, 0.8, 1.62
    points = ["x", "norm(x)", "input of\nq, k, v", "heads", "partial sums\nof out", "their sum", "+ x"]
    for rank, y in enumerate((2.55, 0.35)):
        part = (rank / 2, rank / 2 + 0.5)
        tokens, columns, whole = (*part, 0, 1), (0, 1, *part), (0, 1, 0, 1)  # of the rows, and of the columns: from, to
        one.text(-0.25, y + high / 2, f"rank {rank}", ha="right", va="center", fontsize=13, weight="bold",
                 color=RANKS[rank])
        for k, (top, bottom, left, right) in enumerate((tokens, tokens, whole, columns, whole, tokens, tokens)):
            x = apart * k
            one.add_patch(patches.Rectangle((x, y), wide, high, facecolor="#f2f2f0", edgecolor=FAINT, linewidth=0.8))
            one.add_patch(patches.Rectangle((x + left * wide, y + high * (1 - bottom)), (right - left) * wide,
                                            (bottom - top) * high, facecolor=LIGHT[rank], edgecolor=INK, linewidth=1,
                                            hatch="//" if k == 4 else None))
            if k + 1 < len(points):
                arrow(one, (x + wide + 0.08, y + high / 2), (x + apart - 0.08, y + high / 2), (FAINT, INK)[k in (1, 4)])
    for k, text in enumerate(points):
        one.text(apart * k + wide / 2, 4.2, text, ha="center", va="bottom", fontsize=12, color=INK)
    for k, letter, forward, backward in ((1, "f", "all-gather", "reduce-scatter"),
                                         (4, "g", "reduce-scatter", "all-gather")):
        x = apart * k + wide + 0.41
        one.plot((x, x), (1.1, 3.3), color=INK, linewidth=1.6, zorder=0)
        operator(one, x, 2.2, letter)
        one.text(x, 0.12, f"forward: {forward}\nbackward: {backward}", ha="center", va="top", fontsize=11.5, color=INK)
    one.text(-1.15, 0.12, "rows: 8 tokens\ncolumns: D", va="top", fontsize=11.5, color="#666666")
    one.set(xlim=(-1.2, 10.7), ylim=(-0.5, 4.8), aspect="equal")
    figure.savefig(picture)


def ring(picture) -> None:
    """The scores of a text of eight chunks on four ranks: who computes which at which hop, and how long it takes."""
    size, chunk = 4, 60
    half, length = chunk // 2, 2 * chunk  # of a chunk, of a rank's tokens
    with modules_of(15):
        import context_parallel
        import process_group_manager as pgm
    figure, axes = canvas(10, 7.6, 2, 2, height_ratios=(2.6, 1))
    for column, layout in enumerate(("contiguous", "zigzag")):
        mask, times = axes[:, column]
        mask.set_title(f"{layout}: pairs of chunks, four ranks", fontsize=14, color=INK, weight="bold")
        places = []
        for rank in range(size):
            pgm.process_group_manager = types.SimpleNamespace(cp_rank=rank, cp_world_size=size)
            places.append(context_parallel.local_positions(layout, size * length))
        start = 0
        for hop in range(size):
            work = []
            for rank in range(size):
                block = context_parallel.visible(layout, rank, (rank - hop) % size, length)
                queries, keys, is_causal = block or (slice(0), slice(0), False)
                rows, columns = places[rank][queries], places[(rank - hop) % size][keys]
                for y in rows[half::chunk].tolist():
                    for x in columns[half::chunk].tolist():
                        if x <= y:
                            mask.add_patch(patches.Rectangle((x - half, y - half), chunk, chunk, facecolor=LIGHT[rank],
                                                             edgecolor="#ffffff"))
                            mask.text(x, y, hop, ha="center", va="center", fontsize=11.5, color=INK)
                work.append(len(rows) * len(columns) * (0.5 if is_causal else 1) / length**2)
            for rank, units in enumerate(work):
                times.barh(rank, units, left=start, height=0.75, color=RANKS[rank], edgecolor=GROUND, linewidth=2)
                if units:
                    times.text(start + units / 2, rank, hop, ha="center", va="center", fontsize=11, color="#ffffff")
            start += max(work)
        for i in range(2 * size):
            mask.text(-10, chunk * i + half, i, ha="right", va="center", fontsize=11.5, color=FAINT)
            mask.text(chunk * i + half, -10, i, ha="center", va="bottom", fontsize=11.5, color=FAINT)
        mask.text(-55, size * chunk, "chunk of the queries", rotation=90, ha="center", va="center", fontsize=12,
                  color=INK)
        mask.text(size * chunk, -45, "chunk of the keys", ha="center", va="bottom", fontsize=12, color=INK)
        mask.set(xlim=(-75, 2 * size * chunk + 5), ylim=(2 * size * chunk + 5, -75), aspect="equal")
        for rank in range(size):
            times.text(-0.1, rank, f"rank {rank}", ha="right", va="center", fontsize=12, color=RANKS[rank])
        times.text(start, size - 0.2, f"{start:g}", ha="center", va="top", fontsize=12, color=INK)
        times.text(0, size - 0.2, "0", ha="center", va="top", fontsize=12, color=INK)
        times.text(1.75, size + 0.25, "time, in blocks of pairs; numbers are hops", ha="center", va="top", fontsize=12,
                   color=INK)
        times.set(xlim=(-0.7, 3.9), ylim=(size + 0.7, -0.6))
    figure.savefig(picture)


def axes_of_a_block(picture) -> None:
    """Which part of a layer and of its training two ranks hold along each axis, and what they send each other."""
    figure, axes = canvas(10, 7.6)
    one, high = axes[0, 0], 0.72
    by_rank, columns = {0: [(0, 1)], 1: [(1, 2)]}, ("hidden states\nof two samples", "attention's\nmatrices",
                                                    "MLP's matrices,\nor experts", "four layers", "AdamW's\naverages")
    halves, turns, both = by_rank, {0: [(0, 0.5), (1, 1.5)], 1: [(0.5, 1), (1.5, 2)]}, {}
    # Of each rank: from, to, out of 2 along the height; "|": halves along the width. Nothing: both hold it whole.
    rows = {
        "data": (halves, both, both, both, both, "gradients: their mean, once a step"),
        "ZeRO 1, 2": (halves, both, both, both, halves, "gradients to their owner, weights back"),
        "ZeRO 3": (halves, halves, halves, both, halves, "and weights, just before they are used"),
        "tensor": (both, "|", "|", both, "|", "sums of hidden states, four a layer"),
        "sequence": (turns, "|", "|", both, "|", "the same sums, each in two halves"),
        "context": (turns, both, both, both, both, "keys and values, around a ring"),
        "pipeline": ("own", "own", "own", halves, halves, "hidden states, from stage to stage"),
        "expert": (halves, both, halves, both, {0: [(1, 1.5)], 1: [(1.5, 2)]}, "tokens to their experts, and back"),
    }
    for k, text in enumerate(columns):
        one.text(1.95 * k + 0.75, 0.3, text, ha="center", va="bottom", fontsize=11.5, color=INK)
    one.text(9.7, 0.3, "what travels", va="bottom", fontsize=11.5, color=INK)
    for row, (name, (*cells, travels)) in enumerate(rows.items()):
        y = -0.95 * row - high
        one.text(-0.15, y + high / 2, name, ha="right", va="center", fontsize=13, weight="bold", color=INK)
        one.text(9.7, y + high / 2, travels, va="center", fontsize=12, color=INK)
        for k, cell in enumerate(cells):
            x = 1.95 * k
            one.add_patch(patches.Rectangle((x, y), 1.5, high, facecolor="#e9e9e6", edgecolor=FAINT, linewidth=0.8))
            if cell == "own":
                one.text(x + 0.75, y + high / 2, "of its\nlayers", ha="center", va="center", fontsize=11, color=INK)
                continue
            for rank, parts in (by_rank if cell == "|" else cell).items():
                for start, end in parts:
                    corner, sizes = ((x + 0.75 * start, y), (0.75, high)) if cell == "|" else (
                        (x, y + high * (1 - end / 2)), (1.5, high * (end - start) / 2))
                    one.add_patch(patches.Rectangle(corner, *sizes, facecolor=LIGHT[rank], edgecolor=INK, linewidth=1))
            for i in range(1, {0: 2, 3: 4}.get(k, 1)):  # samples, layers
                one.plot((x, x + 1.5), (y + high * i / {0: 2, 3: 4}[k],) * 2, color=INK, linewidth=0.8)
    for k, (colour, text) in enumerate(((LIGHT[0], "rank 0 holds it"), (LIGHT[1], "rank 1 holds it"),
                                        ("#e9e9e6", "both hold it"))):
        box(one, 3.2 * k, -8.2, 0.5, 0.35, "", colour)
        one.text(3.2 * k + 0.65, -8.02, text, va="center", fontsize=12, color=INK)
    one.set(xlim=(-1.4, 13.6), ylim=(-8.3, 1.1))
    figure.savefig(picture)
