"""Wrong and right answers to the exercises of step 14; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "norm_gradients": Versions(
        wrong=[
            Wrong("the sum stays in a copy", "gradient.copy_(total.view_as(gradient))", "gradient = total",
                  "compared with one process"),
            Wrong("the mean is taken", "    all_reduce(flat)\n",
                  "    all_reduce(flat)\n    flat /= pgm.process_group_manager.tp_world_size\n", "1/2 of it"),
            Wrong("matrices are summed, too", ' if kind(name) == "whole"]', "]", "gradient norm of step 1"),
        ],
        right='''
def sum_norm_gradients(model):
    for param in model.module.parameters():
        if param.dim() == 1:
            all_reduce(model.gradient(param))  # right, with a message for each norm
'''),
    "conjugate": Versions(
        wrong=[
            Wrong("a reduce-scatter: tp times too large", "        return grad.chunk(",
                  "        grad = grad.clone()\n        dist.all_reduce(grad)\n        return grad.chunk(",
                  "reduce_scatter in backward are not the types V -> I"),
            Wrong("each rank keeps the first rows", "[dist.get_rank()]", "[0]", "rank 1: 2 ranks"),
            Wrong("all ranks' parts are averaged", "dist.get_rank()]", "dist.get_rank()] / dist.get_world_size()",
                  "1/2 of it"),
        ]),
    "annotate": Versions(
        wrong=[
            Wrong("norms are I with sequence parallelism, too", '"R" if sequence_parallel else "I"', '"I"',
                  "with --tp_size 2 --sequence_parallel this is refused"),
            Wrong("norms are R always", '"R" if sequence_parallel else "I"', '"R"', "with --tp_size 2 this is refused"),
            Wrong("what is split is R", 'return "V"', 'return "R"', "take P and give I, but the input is R"),
        ]),
}
