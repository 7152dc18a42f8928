"""Step 16: experts on different ranks, to which tokens travel."""

import torch

from attempt import random
from catalogue import exercise
from lab.program import Program

WIDTH = 3


def make_experts(numbers: range) -> dict[str, torch.nn.Linear]:
    """Stand-ins for MLPs, each with weights of its own."""
    experts = {str(number): torch.nn.Linear(WIDTH, WIDTH, bias=False).double() for number in numbers}
    for name, expert in experts.items():
        torch.nn.init.normal_(expert.weight, generator=torch.Generator().manual_seed(int(name)))
    return experts


@exercise("16", "expert_parallel.ExpertParallel.run", hints=(
    "Exchange the counts first: each rank sends counts[experts of rank j] to rank j. What arrives, as (ranks, own "
    "experts), tells how many rows come from whom and for which expert.",
    "AllToAll.apply(rows, sent, received): sent[j] is the sum of the counts of rank j's experts. The rows arrive by "
    "rank, and within it by expert. The experts need them by expert.",
    "Write down the expert of each row that arrives (repeat_interleave), argsort it with stable=True, run "
    "super().run(sorted rows, rows of each own expert), undo the order with order.argsort(), and send the results back "
    "with sent and received swapped."), wrong=[
    ("rows are not sorted by expert", "rows.index_select(0, order), here", "rows, here", "the results of its rows"),
    ("the order is not undone", "order.argsort()), received, sent", "order), received, sent",
     "the results of its rows"),
    ("the numbers are not swapped on the way back", "received, sent)", "sent, received)", "rank")])
def dispatch_and_combine(attempt):
    """Send rows to the ranks that hold their experts, run the experts, and return the results.

    Rank j of N ranks holds len(self) = E/N experts: j E/N and the following ones. This rank has rows (n, D), sorted by
    expert: the first counts[0] of them are for expert 0, and so on for all E. Return their results (n, D) in the same
    order. Here two ranks have two experts each:

        rank 0   | rows for 0 | 1 | 2 | 3 |    all-to-all    rank 0   | for 0 | 1 | of rank 0 | for 0 | 1 | of rank 1 |
        rank 1   | rows for 0 | 1 | 2 | 3 |   ------------>  rank 1   | for 2 | 3 | of rank 0 | for 2 | 3 | of rank 1 |

    Counts differ from rank to rank, some are 0, and a rank may have no rows at all. An expert without rows runs, too.

    You may call: exchange(tensor, sent, received), which sends the first sent[0] entries along dim 0 to rank 0, the
    next sent[1] to rank 1 and so on, and returns received[0] entries of rank 0, then those of rank 1, ...; both are
    lists of integers. AllToAll.apply(rows, sent, received) does the same, with a backward. super().run(rows, counts)
    runs this rank's own experts on rows that are sorted by expert, counts[i] for its i-th one, and returns their
    results. N is pgm.process_group_manager.ep_world_size.
    """
    situations = {"2 ranks, 4 experts": [[1, 2, 0, 3], [2, 0, 1, 1]], "expert 1 gets no rows": [[2, 0], [1, 0]],
                  "rank 1 has no rows": [[1, 2, 1], [0, 0, 0], [2, 0, 3]],
                  "3 ranks, 6 experts": [[1, 0, 2, 1, 3, 1], [0, 2, 1, 0, 1, 4], [2, 1, 1, 3, 0, 0]]}
    for what, counts in situations.items():
        size, num_experts = len(counts), len(counts[0])
        rows = [torch.randn(sum(each), WIDTH, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
                for rank, each in enumerate(counts)]

        def program(modules, rank):
            attempt.grid(modules, dp=size, ep_size=size)
            own = num_experts // size
            local = make_experts(range(rank * own, (rank + 1) * own))
            experts = modules.expert_parallel.ExpertParallel(local, num_experts)
            mine = rows[rank].clone().requires_grad_()
            results = experts.run(mine, torch.tensor(counts[rank]))
            (results * (rank + 1)).sum().backward()
            return results, mine.grad, {name: expert.weight.grad for name, expert in experts.items()}

        everyone, expected, whole = make_experts(range(num_experts)), [], []
        for rank, each in enumerate(counts):
            whole.append(rows[rank].clone().requires_grad_())
            parts = whole[-1].split(each)
            expected.append(torch.cat([expert(part) for expert, part in zip(everyone.values(), parts)]))
            (expected[-1] * (rank + 1)).sum().backward()
        got, _ = attempt.run(size, program)
        for rank, (results, gradient, of_experts) in enumerate(got):
            attempt.same(results, expected[rank], f"{what}: the results of its rows", rank)
            attempt.same(gradient, whole[rank].grad, f"{what}: the gradient of its rows", rank)
            attempt.same(of_experts, {name: everyone[name].weight.grad for name in of_experts},
                         f"{what}: the gradient of expert", rank)


@exercise("16", "references:references.routed", hints=(
    "Run the check with a line that does nothing, such as `pass`: the refusal names the axis and both types.",
    "x and the weights are I: the same on each rank, and so are their gradients. up and down are V.",
    "Both x and the weights are multiplied by something that is V, so both need f. Not before the softmax: the router "
    "is whole on each rank."),
    blank=("x, weights = ",), wrong=[
    ("the router's weights lack f", "f(x), f(weights)", "f(x), weights", "cannot mix with other types"),
    ("g in the place of f", "f(x), f(weights)", "g(x), g(weights)", "tensor has"),
    ("f already at the router", "    weights = torch.softmax(x", "    weights = torch.softmax(f(x)",
     "cannot mix with other types"),
    ("x comes back", "    x, weights = f(x), f(weights)\n", "    return x\n", "the gradient of down is None"),
    ("the router is ignored", "f(x), f(weights)", "f(x), f(torch.ones_like(weights))",
     "the gradient of router is None"),
    ("the router is detached", "f(x), f(weights)", "f(x), f(weights.detach())", "the gradient of router is None"),
    ("x is detached", "f(x), f(weights)", "f(x.detach()), f(weights)", "gradient of x: 32 of 32 numbers"),
    ("half of it", "f(x), f(weights)", "f(x) / 2, f(weights)", "(1/2 of it)"),
    ("4 tokens always", "f(x), f(weights)", "f(x[:4]), f(weights[:4])", "has shape [4, 3], but has to have [5, 3]"),
    ("the scores go through f, too", "f(x), f(weights)", "f(x), f(torch.cat([weights, 0 * x], 1))[:, :1]",
     "f is given 68 numbers")])
def missing_collective(attempt):
    """Find what is missing from the refusal: a block with a router lacks a collective or two.

    x (N, D) and router (D, E) are the same on each tp rank, and so have to be their gradients: I. up (D, H/tp) and down
    (H/tp, D) are parts: V. Without a line, types refuse the block (docs/TYPES.md):

        Invariant type on axis tp cannot mix with other types. Found types: [I, V]
          In matmul(args[0]: f64[4, 8] {tp: I}, args[1]: f64[8, 6] {tp: V})

    f(tensor) and g(tensor) are those of step 4. Write the line, so that nothing is refused, and that the result and all
    gradients are those of one process. f need not get more than x and the weights, N D + N numbers (N D are possible).
    """
    rows, sent = random_block(4, 8, 3, 12), {"f": 0, "g": 0}
    if attempt.in_one_process:
        with attempt.typed({"tp": 2}) as rank:
            from lab.watch.types import I, P, R, V, spmd

            tensors = {name: torch.nn.Parameter(part) for name, part in parts_of(rows, 2)[0].items()}
            rank.start(tensors, lambda name: {"tp": V if name in ("up", "down") else I})
            tp = torch.distributed.group.WORLD

            def f(tensor):
                sent["f"] += tensor.numel()
                return spmd.convert(tensor, tp, src=I, dst=R)

            def g(tensor):
                sent["g"] += tensor.numel()
                return spmd.all_reduce(spmd.assert_type(tensor, {tp: P}), tp, src=P, dst=I)

            spmd.assert_type(attempt.function()(*tensors.values(), f, g), {tp: I})
    for size, shape in ((2, (4, 8, 3, 12)), (3, (5, 3, 4, 6))):
        rows, grad = random_block(*shape), random(*shape[:2], seed=9)
        whole = {name: tensor.clone().requires_grad_() for name, tensor in rows.items()}
        expected = attempt.function(attempt.ours)(*whole.values(), lambda tensor: tensor, lambda tensor: tensor)
        expected.backward(grad)

        def program(modules, rank):
            step4 = Program("4").load()
            attempt.grid(step4, tp=size)
            mine = {name: part.clone().requires_grad_() for name, part in parts_of(rows, size)[rank].items()}
            y = modules.references.routed(*mine.values(), *(
                lambda tensor, each=each: each.apply(tensor * 1) for each in (
                    step4.tensor_parallel.Copy, step4.tensor_parallel.Reduce)))
            attempt.same(y, expected, f"the result on {size} ranks", rank, torch.inf)  # its shape
            attempt.require(y.requires_grad, "autograd can't follow what computes the result")
            y.backward(grad)
            return {"result": y, **{f"gradient of {name}": part.grad for name, part in mine.items()}}

        gradients = parts_of({name: tensor.grad for name, tensor in whole.items()}, size)
        for rank, got in enumerate(attempt.run(size, program)[0]):
            right = {"result": expected, **{f"gradient of {name}": part for name, part in gradients[rank].items()}}
            for what in reversed(right):  # whether it is there
                attempt.same(got[what], right[what], f"with {size} ranks, the {what}", rank, torch.inf)
            attempt.same(got, right, f"{size} ranks, compared with one process", rank)
    attempt.require(sent["f"] <= 4 * 8 + 4 and sent["g"] <= 4 * 8, f"for N = 4 and D = 8, f is given {sent['f']} "
                    f"numbers and g {sent['g']}, where 36 and 32 are enough: what need not go through them?")


def random_block(tokens: int, hidden: int, experts: int, width: int) -> dict[str, torch.Tensor]:
    return {"x": random(tokens, hidden, seed=1), "router": random(hidden, experts, seed=2),
            "up": random(hidden, width, seed=3), "down": random(width, hidden, seed=4)}


def parts_of(block: dict[str, torch.Tensor], size: int) -> list[dict[str, torch.Tensor]]:
    """What each of `size` tp ranks has: a part of `up` and `down`."""
    return [{"x": block["x"], "router": block["router"], "up": block["up"].chunk(size, 1)[rank],
             "down": block["down"].chunk(size, 0)[rank]} for rank in range(size)]
