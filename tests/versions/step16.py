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
            Wrong("there is no backward", "rows = AllToAll.apply(rows, sent, received)", "rows = exchange(rows, "
                "sent, received)",
                  "the gradient of its rows"),
            Wrong("the counts are taken for everybody's", "exchange(counts, equal, equal)",
                  "counts.view(size, -1)[pgm.process_group_manager.ep_rank].repeat(size)", "rows to rank"),
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
    "balance_of_experts": Versions(
        wrong=[
            Wrong("the mean over tokens is forgotten", "chosen.numel() / len(scores)", "chosen.numel()",
                  "the gradient of the router's logits"),
            Wrong("k is forgotten", "chosen.numel() / len(scores)", "len(scores) / len(scores)", "5 tokens, k = 2"),
            Wrong("it takes the place of the gradient", "other + gradient)", "gradient.expand_as(other))",
                  "the gradient of the router's logits"),
            Wrong("E is forgotten", "self.loss_weight * scores.size(1)", "self.loss_weight",
                  "the gradient of the router's logits"),
            Wrong("it does not ask whether a backward comes", "if self.loss_weight and scores.requires_grad:",
                  "if self.loss_weight:", "cannot register a hook"),
        ],
        right='''
def after_choice(self, router, args, output):
    scores, chosen = output
    num_tokens, num_experts = scores.shape
    counts = torch.stack([(chosen == expert).sum() for expert in range(num_experts)])
    self.loads[router] += counts
    term = self.loss_weight * num_experts * counts / (chosen.numel() * num_tokens)
    if scores.requires_grad:
        scores.register_hook(lambda gradient: gradient + term.expand_as(gradient))
'''),
}
