"""Wrong and right answers to the exercises of step 16; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "dispatch_and_combine": Versions(
        wrong=[
            Wrong("rows are not sorted by expert", "rows.index_select(0, order), here", "rows, here", "the results "
                "of its rows"),
            Wrong("the order is not undone", "order.argsort()), received, sent", "order), received, sent",
                  "the results of its rows"),
            Wrong("the numbers are not swapped on the way back", "received, sent)", "sent, received)", "rank"),
        ],
        right='''
def run(self, rows, counts):
    size, own = pgm.process_group_manager.ep_world_size, len(self)
    here = exchange(counts, [own] * size, [own] * size).tolist()
    sent = [sum(counts.tolist()[j * own : (j + 1) * own]) for j in range(size)]
    received = [sum(here[j * own : (j + 1) * own]) for j in range(size)]
    pieces = AllToAll.apply(rows, sent, received).split(here)  # (rank, expert) after (rank, expert)
    results = [None] * len(pieces)
    for expert in range(own):
        mine = pieces[expert::own]
        out = [*self.values()][expert](torch.cat(mine))
        results[expert::own] = out.split([len(piece) for piece in mine])
    return AllToAll.apply(torch.cat(results), received, sent)
'''),
}
