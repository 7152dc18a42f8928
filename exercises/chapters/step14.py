"""Step 14: tokens divided between the blocks (sequence parallelism)."""

import contextlib

import torch

from attempt import random
from catalogue import exercise
from counting_runs import llama
from lab.program import Program

RIGHT = ("all_gather", "part")  # what a gather that all ranks use alike calls in forward and backward


def hidden_states(rank: int, tokens: int) -> torch.Tensor:
    """(2, tokens, 3): thousands say the sample, tens the token, and a power of ten the rank."""
    sample, token, width = torch.meshgrid(*(torch.arange(n, dtype=torch.float64) for n in (2, tokens, 3)),
                                          indexing="ij")
    return (1000 * sample + 10 * token + width + 1) * 10.0 ** (5 * rank)


@exercise("14", "sequence_parallel.sum_norm_gradients", hints=(
    "The norms' weights are the parameters with param.dim() == 1, and model.gradient(param) is what has to be summed.",
    "One message: torch.cat the gradients, call all_reduce, and split the sum into pieces of the same sizes.",
    "Write each piece back with gradient.copy_(piece): the optimizer reads the memory of these very tensors."), wrong=[
    ("the sum stays in a copy", "gradient.copy_(total.view_as(gradient))", "gradient = total",
     "compared with one process"),
    ("halved", "1/2 of it"),
    ("matrices are summed, too", ' if kind(name) == "whole"]', "]", "gradient norm of step 1")])
def norm_gradients(attempt):
    """Sum over the tp ranks those gradients to which each rank has summands of its own tokens only.

    The weights of the norms are on every tp rank, whole, but a rank has seen the r-th part of the tokens. So each holds
    a part of their gradient, where all need the sum:

        rank 0   gradient of its tokens    [2, 0, 1]  \\
                                                       >   both need [3, 4, 1]
        rank 1   gradient of its tokens    [1, 4, 0]  /

    The model has two or more such vectors a layer, and its other parameters are matrices, whose gradients are complete.
    Change the gradients in place, with as few messages as you can.

    model.module.parameters() are the parameters. model.gradient(param) is the tensor that this rank holds of a gradient
    and that the optimizer reads: all of it, or with ZeRO a flat piece of it, which may be empty. all_reduce(tensor)
    sums a tensor over the tp ranks, in place, and the tensor has to be contiguous.
    """
    common = " --num_hidden_layers 2 --max_tokens 128 --max_grad_norm 0 --gradient_accumulation_steps "
    one = attempt.train(1, common + "4", ours=True)
    for size, flags in ((2, "--tp_size 2"), (4, "--tp_size 2 --dp_size 2 --zero 1")):
        flags += " --sequence_parallel"
        accumulation = common + str(8 // size)
        got = attempt.train(size, flags + accumulation)
        norms = [name for name in one.gradients[0][0] if "norm" in name]
        for rank in range(size if "--zero" not in flags else 0):
            for name in norms:
                attempt.same(got.gradients[rank][0][name], one.gradients[0][0][name], f"{flags}: the gradient of "
                             f"{name}, compared with one process", rank)
        for step in range(2):
            attempt.same(got.rows[step]["grad_norm"], one.rows[step]["grad_norm"],
                         f"{flags}: the gradient norm of step {step + 1}, compared with one process")
        if "--zero" not in flags:
            ours = attempt.train(size, flags + accumulation, ours=True)
            sent = [sum(event.kind != "receive" for event in run.world.events) for run in (got, ours)]
            attempt.score("messages a step for the norms of 2 layers", 1 + (sent[0] - sent[1]) / (2 * size), 1)


@exercise("14", "references:references.GatherAlike", hints=(
    "Its types are V -> I: what is the type of the gradient of something that is I?",
    "The gradient that comes back is the same on each rank, and complete: nothing has to be sent.",
    "Each rank keeps the rows that it has given: chunk the gradient by dist.get_world_size(), and take dist.get_rank()."
    ), blank=("def backward",), wrong=[
    ("a reduce-scatter: tp times too large", "        return grad.chunk(",
     "        grad = grad.clone()\n        dist.all_reduce(grad)\n        return grad.chunk(",
     "reduce_scatter in backward are not the types V -> I"),
    ("each rank keeps the first rows", "[dist.get_rank()]", "[0]", "rank 1: 2 ranks"),
    ("all ranks' parts are averaged", "dist.get_rank()]", "dist.get_rank()] / dist.get_world_size()", "1/2 of it"),
    ("a reduce-scatter, divided", "        return grad.chunk(dist.get_world_size())[dist.get_rank()]",
     "        parts = [part.clone() for part in grad.chunk(dist.get_world_size())]\n"
     "        dist.reduce_scatter(parts[0], parts)\n        return parts[0] / dist.get_world_size()",
     "reduce_scatter in backward are not the types V -> I"),
    ("no return", "        return grad.chunk(", "        grad.chunk(", "what backward returns is None"),
    ("all rows", "        return grad.chunk(dist.get_world_size())[dist.get_rank()]", "        return grad",
     "what backward returns has shape [4, 3]"),
    ("two rows always", "grad.chunk(dist.get_world_size())[dist.get_rank()]", "grad[2 * dist.get_rank() :][:2]",
     "rank 2: what backward returns"),
    ("a message that nobody needs", "        return grad.chunk(", "        dist.barrier()\n        return grad.chunk(",
     "backward has nothing to send")])
def conjugate(attempt):
    """Write the backward that belongs to an all-gather whose result all ranks use alike: its type says which.

    Each rank has some of the rows (V). forward gathers them, and all ranks compute the same loss from all rows, so the
    types are V -> I (docs/TYPES.md):

        forward     own rows, V  -----> all rows, I    -> all ranks alike -> the same loss
        backward    own rows     <----- grad

    grad (N, D) is the gradient of the loss with respect to all rows. Return that with respect to this rank's (N/n, D).
    dist.get_rank() and dist.get_world_size() are rank and number of ranks n; there is only one group.
    """
    with attempt.typed({"tp": 2}) if attempt.in_one_process else contextlib.nullcontext() as rank:
        calls = rank.observe(attempt.checked(attempt.function()), (random(2, 3),)) if rank else {"tp": RIGHT}
        found = next(iter(calls.values()), ("", ""))
        attempt.require(found == RIGHT, f"{found[0] or 'nothing'} in forward and "
                        f"{found[1] or 'nothing'} in backward are not the types V -> I: what does the gradient of an I "
                        "need?")
    for size, rows, width in ((2, 2, 3), (3, 1, 4), (4, 3, 2)):
        def program(modules, rank):
            x = random(rows, width, seed=rank).requires_grad_()
            y = attempt.checked(modules.references.GatherAlike).apply(x)
            y.backward(random(rows * size, width, seed=9))
            return {"all rows": y, "the gradient of a rank's rows": x.grad}

        world = attempt.both(size, program, f"{size} ranks with {rows} rows each")
        for event in world.events:
            attempt.require(event.kind == "all_gather", f"rank {event.rank} calls {event.kind}: the gradient is there "
                            "on each rank already, so backward has nothing to send")


@exercise("14", "references:references.type_on_tp", hints=(
    "A matrix that is split has other numbers on each rank.",
    "Without sequence parallelism the norms see what is the same on each rank, and so is their gradient.",
    "With it, each rank's norms see its own tokens: the weight is the same, and each has a summand of its gradient."),
    wrong=[
    ("norms are I with sequence parallelism, too", '"R" if sequence_parallel else "I"', '"I"',
     "with --tp_size 2 --sequence_parallel this is refused"),
    ("norms are R always", '"R" if sequence_parallel else "I"', '"R"', "with --tp_size 2 this is refused"),
    ("what is split is R", 'return "V"', 'return "R"', "take P and give I, but the input is R"),
    ("no such letter", 'return "V"', 'return "v"', "of embedding.weight it returns 'v'"),
    ("P", 'return "R" if sequence_parallel else "I"', 'return "P"', "no weight is meant as a sum"),
    ("the first layer's norms only", 'if "norm" not in name', 'if "norm" not in name or ".1." in name',
     "Look at decoder_layers.1.input_layernorm.weight"),
    ("the final norm is forgotten", 'if "norm" not in name', 'if "layernorm" not in name',
     "Look at final_norm.weight: is it V?")])
def annotate(attempt):
    """Annotate a model: say of each weight which type it has along tp, so that types can be checked.

    The model is that of this chapter, with and without sequence parallelism, after apply_tensor_parallel(). `name` is
    as in model.named_parameters(): "embedding.weight", "decoder_layers.0.input_layernorm.weight",
    "decoder_layers.0.attention.q_proj.weight", ... Return a letter of docs/TYPES.md:

        "R"   the same on each rank, and each rank has a summand of its gradient
        "I"   the same on each rank, and so is its gradient
        "V"   other numbers on each rank

    The check runs an optimizer step of train.py under your types, and says what is refused.
    """
    with attempt.typed({"tp": 2}):  # which says so where types are not installed
        pass
    from museum.typed import check_step

    answer, ours = attempt.function(), attempt.function(attempt.ours)
    names = [name for name, _ in llama(32, 16, 24, 12, 4, 4, 4).named_parameters()]  # of 12 layers
    for more in ((), ("--sequence_parallel",)):
        flags, found = ("--tp_size", "2", *more), {name: answer(name, bool(more)) for name in names}
        for name, letter in found.items():
            attempt.require(letter in ("R", "I", "V"), f'of {name} it returns {letter!r}, and not "R", "I" or "V": '
                            + ("P is a summand, and no weight is meant as a sum over the ranks" if letter == "P" else
                               "a type is one of these letters"))
        wrong = [name for name in names if found[name] != ours(name, bool(more))]
        refused = check_step(Program("14", flags), answer) or wrong and "(in a model of more layers)"
        attempt.require(not refused, f"with {' '.join(flags)} this is refused:\n{refused}\n" + "".join(
            f"  Look at {name}: is it {found[name]}?" for name in wrong[:1]))
