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
        ]),
    "missing_collective": Versions(
        wrong=[
            Wrong("the router's weights lack f", "f(x), f(weights)", "f(x), weights", "cannot mix with other types"),
            Wrong("g in the place of f", "f(x), f(weights)", "g(x), g(weights)", "tensor has"),
            Wrong("f already at the router", "    weights = torch.softmax(x", "    weights = torch.softmax(f(x)",
                  "cannot mix with other types"),
        ]),
}
