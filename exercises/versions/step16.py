"""Wrong and right answers to the exercises of step 16."""

from versions import Versions, Wrong

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
            Wrong("x comes back", "    x, weights = f(x), f(weights)\n", "    return x\n",
                  "the gradient of down is None"),
            Wrong("the router is ignored", "f(x), f(weights)", "f(x), f(torch.ones_like(weights))",
                  "the gradient of router is None"),
            Wrong("the router is detached", "f(x), f(weights)", "f(x), f(weights.detach())",
                  "the gradient of router is None"),
            Wrong("x is detached", "f(x), f(weights)", "f(x.detach()), f(weights)", "gradient of x: 32 of 32 numbers"),
            Wrong("half of it", "f(x), f(weights)", "f(x) / 2, f(weights)", "(1/2 of it)"),
            Wrong("4 tokens always", "f(x), f(weights)", "f(x[:4]), f(weights[:4])",
                  "has shape [4, 3], but has to have [5, 3]"),
            Wrong("the scores go through f, too", "f(x), f(weights)", "f(x), f(torch.cat([weights, 0 * x], 1))[:, :1]",
                  "f is given 68 numbers"),
        ]),
}
