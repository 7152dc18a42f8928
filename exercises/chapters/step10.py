"""Step 10: backward in two parts, and the zero-bubble schedule."""

import torch

from catalogue import exercise
from schedule_attempt import play_schedule, train_with

FBW = {"F": 1, "B": 1, "W": 1}


class Buckets:
    """Stands for a DataParallelBucket: it notes which weights are ready, with their gradients then."""

    def __init__(self, weights):
        self.bucket_of, self.ready = dict.fromkeys(weights), []

    def mark_param_as_ready(self, weight):
        self.ready.append((weight, None if weight.grad is None else weight.grad.clone()))


def matrices(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@exercise("10", "weight_gradients.add_weight_gradients", hints=(
    "Flatten all dimensions but the last: x (N, in) and dy (N, out). dW has the shape (out, in).",
    "dW = dy.t() @ x, in the dtype of the activations. The first one becomes weight.grad, later ones are added to it.",
    "Afterwards, if weight is in model.bucket_of: model.mark_param_as_ready(weight)."), wrong=[
    ("the second micro-batch replaces the first", "if weight.grad is None:", "if True:", "after micro-batch 1"),
    ("twice dW", "grad, x = entries.pop(0)\n", "grad, x = entries.pop(0)\n        grad = 2 * grad\n",
     "the gradient of weight 0"),
    ("the dtype of the activations", "(grad @ x).to(weight.dtype)", "grad @ x", "dtype"),
    ("the data parallelism is not told", "model.mark_param_as_ready(weight)", "pass", "was called 0 times"),
    ("told with half of it", "            model.mark_param_as_ready(weight)",
     "            weight.grad /= 2\n            model.mark_param_as_ready(weight)\n            weight.grad *= 2",
     "when mark_param_as_ready is called"),
    ("two dims before the last always", "grad.flatten(0, -2).t(), x.flatten(0, -2)",
     "grad.flatten(0, 1).t(), x.flatten(0, 1)", "must be a matrix")])
def weight_half_of_backward(attempt):
    """Compute the gradients of the weights that backward has postponed.

    `entries` are triples of a weight (out, in), dy (..., out) and x (..., in), one for each linear layer that a
    micro-batch has passed. The gradient of y = x W^T is a sum over all N tokens:

        dW  =  dy^T       x            (out, in) = (out, N) (N, in)

    Add it to weight.grad, which is None before the first micro-batch of a step. The activations may be bfloat16; the
    gradient has the dtype of the weight. Autograd's hooks don't run here, so tell the data parallelism yourself: where
    `weight in model.bucket_of`, call model.mark_param_as_ready(weight) after its gradient is complete.
    """
    def program(modules, rank):
        add = modules.weight_gradients.add_weight_gradients
        for dtype, tolerance in ((torch.float64, 1e-12), (torch.bfloat16, 0.02)):
            weights = [torch.nn.Parameter(weight) for weight in matrices((5, 4), (3, 4), (2, 4))]
            model, total = Buckets(weights[:1]), [0, 0, 0]
            for microbatch, shape in enumerate([(2, 7), (3, 5), (6,)]):
                entries = [(weight, *matrices((*shape, len(weight)), (*shape, 4), dtype=dtype)) for weight in weights]
                add([*entries], model)
                for k, (weight, dy, x) in enumerate(entries):
                    total[k] = total[k] + torch.einsum("...o,...i->oi", dy.double(), x.double())
                    what = f"the gradient of weight {k} after micro-batch {microbatch}, activations in {dtype}"
                    attempt.same(weight.grad, total[k], what, tolerance=tolerance)
                    attempt.require(weight.grad.dtype == weight.dtype, f"{what} is {weight.grad.dtype}")
                if model.ready:
                    attempt.same(model.ready[-1][1], total[0], f"the gradient of weight 0 when mark_param_as_ready is "
                                 f"called, in micro-batch {microbatch}", tolerance=tolerance)
            attempt.require(len(model.ready) == 3 and model.ready[0][0] is weights[0],
                            f"mark_param_as_ready was called {len(model.ready)} times in 3 micro-batches, for the "
                            "weights in model.bucket_of, of which there is 1")

    attempt.run(1, program)


@exercise("10", "pipeline_parallel.postpone_weight_gradients", hints=(
    "Yield each action of the schedule unchanged. After a B, its W has to wait in a queue.",
    "action._replace(kind=\"W\") is the W of a B. Take the oldest one out when more than `delay` are waiting.",
    "At the end, the rest of the queue."), wrong=[
    ("postponed", "never does W"),
    ("the oldest W stays in the queue", "yield waiting.popleft()", "yield waiting[0]", "does W0 2 times"),
    ("forwards get a W, too", 'if action.kind == "B":', "if True:", "2 times")])
def zero_bubble(attempt):
    """Fill the bubble with W, the second half of backward.

    `actions` are the F and B of a stage. Yield them all, in this order, and for each B a W of the same micro-batch: the
    W comes `delay` further B later, and those that are left come at the end. Stage s of 1F1B is given delay = s. With
    three stages and four micro-batches, F, B and W of one unit each (stage 0 does W as part of its B, two units):

        stage 0   F0 F1 F2 .  .  B0 -- F3 B1 -- B2 -- B3 --
        stage 1   .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 B3 W2 W3       W0 after B1: one B later
        stage 2   .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3       W0 after B2: two B later

    An action is a tuple (kind, microbatch): `action.kind`, and `action._replace(kind="W")` for a copy. Stars are for
    the time of the whole and the activations that are alive, which is from F to W.
    """
    schedule = attempt.theirs.load().pipeline_parallel.zero_bubble
    for p, m in ((2, 2), (2, 1), (4, 6), (3, 8)):
        played = play_schedule(attempt, schedule, p, m, seconds=FBW)
        for stage, spans in enumerate(played.spans[1:], 1):
            attempt.require(any(span.kind == "W" for span in spans), f"stage {stage} of {p} yields no W: only stage 0 "
                                                                     "does it as a part of B")
    train_with(attempt, "--pp_engine zb")
    # The last stage waits p - 1 units, and has 3 m of work. A micro-batch is alive on stage 0 for 2 p + 1 units at
    # least: with p = 3 and m = 8 on average 56 / 26, so more than 2 at some time.
    attempt.score("units of time, 3 stages, 8 micro-batches", played.end, 3 * m + p - 1)
    attempt.score("activations alive at most on a stage", max(max(played.peaks), p), p)
