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
}
