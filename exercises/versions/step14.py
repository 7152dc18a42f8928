"""Wrong and right answers to the exercises of step 14."""

from versions import Versions, Wrong, museum

VERSIONS = {
    "norm_gradients": Versions(
        wrong=[
            Wrong("the sum stays in a copy", "gradient.copy_(total.view_as(gradient))", "gradient = total",
                  "compared with one process"),
            museum("halved", "1/2 of it"),
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
            Wrong("a reduce-scatter, divided", "        return grad.chunk(dist.get_world_size())[dist.get_rank()]",
                  "        parts = [part.clone() for part in grad.chunk(dist.get_world_size())]\n"
                  "        dist.reduce_scatter(parts[0], parts)\n        return parts[0] / dist.get_world_size()",
                  "reduce_scatter in backward are not the types V -> I"),
            Wrong("no return", "        return grad.chunk(", "        grad.chunk(", "what backward returns is None"),
            Wrong("all rows", "        return grad.chunk(dist.get_world_size())[dist.get_rank()]",
                  "        return grad", "what backward returns has shape [4, 3]"),
            Wrong("two rows always", "grad.chunk(dist.get_world_size())[dist.get_rank()]",
                  "grad[2 * dist.get_rank() :][:2]", "rank 2: what backward returns"),
            Wrong("a message that nobody needs", "        return grad.chunk(",
                  "        dist.barrier()\n        return grad.chunk(", "backward has nothing to send"),
        ]),
    "annotate": Versions(
        wrong=[
            Wrong("norms are I with sequence parallelism, too", '"R" if sequence_parallel else "I"', '"I"',
                  "with --tp_size 2 --sequence_parallel this is refused"),
            Wrong("norms are R always", '"R" if sequence_parallel else "I"', '"R"', "with --tp_size 2 this is refused"),
            Wrong("what is split is R", 'return "V"', 'return "R"', "take P and give I, but the input is R"),
            Wrong("no such letter", "return \"V\"", "return \"v\"", "of embedding.weight it returns 'v'"),
            Wrong("P", "return \"R\" if sequence_parallel else \"I\"", "return \"P\"", "no weight is meant as a sum"),
            Wrong("the first layer's norms only", "if \"norm\" not in name",
                  "if \"norm\" not in name or \".1.\" in name", "Look at decoder_layers.1.input_layernorm.weight"),
            Wrong("the final norm is forgotten", "if \"norm\" not in name", "if \"layernorm\" not in name",
                  "Look at final_norm.weight: is it V?"),
        ]),
}
