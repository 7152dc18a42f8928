"""Wrong and right answers to the exercises of step 4."""

from versions import Versions, Wrong, museum

VERSIONS = {
    "f": Versions(
        wrong=[
            museum("partial", "the gradient of the input"),
            Wrong("the gradient is summed in place", "grad = grad.clone(memory_format=torch.contiguous_format)",
                  "grad = grad.contiguous()", "Autograd may use it elsewhere"),
            Wrong("the copy has the strides of the gradient", "grad.clone(memory_format=torch.contiguous_format)",
                  "grad.clone()", "is_contiguous()"),
            Wrong("only the first row's gradient", "        return grad\n", "        return grad[0]\n",
                  "what backward returns has shape [3], but has to have [2, 3]"),
        ]),
    "g": Versions(
        wrong=[
            museum("double", "the gradient of this rank's term"),
            Wrong("nothing is summed", "        all_reduce(x)\n", "", "the output"),
            Wrong("the mean instead of the sum", "        return x\n",
                  "        x /= pgm.process_group_manager.tp_world_size\n        return x\n", "(1/2 of it)"),
            Wrong("the given gradient is cleared", "        return grad\n",
                  "        own = grad.clone()\n        grad.zero_()\n        return own\n",
                  "backward changes the tensor"),
        ]),
    "vocab_parallel_cross_entropy": Versions(
        wrong=[
            Wrong("each rank subtracts its own largest logit", "all_reduce(largest, dist.ReduceOp.MAX)", "pass",
                  "the loss of 4 tokens"),
            Wrong("nothing is subtracted", "logits = logits - largest.unsqueeze(-1)", "logits = logits.clone()",
                  "logits up to 2"),
            Wrong("other ranks count column 0 as the target", ".squeeze(-1).masked_fill(elsewhere, 0.0)",
                  ".squeeze(-1)", "the loss of 4 tokens"),
            Wrong("4 tokens always", ".mean()", ".sum() / 4", "the loss of 3 tokens"),
            Wrong("the logits are changed", "logits = logits - largest.unsqueeze(-1)",
                  "logits = logits.sub_(largest.unsqueeze(-1))", "forward changes the logits"),
        ]),
    "norm_over_tp": Versions(
        wrong=[
            museum("counted", "the gradient norm with tp_size 2"),
            Wrong("each rank has the norm of its part",
                  "all_reduce(squares)", "pass", "the gradient norm with tp_size 2"),
            Wrong("norms are summed instead of squares", "get_total_norm(rows) ** 2\n", "get_total_norm(rows)\n",
                  "the gradient norm with tp_size 2"),
        ]),
    "recursive_doubling": Versions(
        wrong=[
            Wrong("the partner is the next rank", "grid.tp_rank ^ distance",
                  "(grid.tp_rank + distance) % grid.tp_world_size", "deadlock"),
            museum("crossed", "circle"),
            Wrong("the maximum is forgotten", "torch.add if op == dist.ReduceOp.SUM else torch.maximum", "torch.add",
                  "the maximum"),
            Wrong("distances for 8 ranks", "(1, 2, 4, 8)[", "(1, 2, 4)[", "tp 16, the sum"),
        ]),
}
