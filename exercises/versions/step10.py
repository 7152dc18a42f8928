"""Wrong and right answers to the exercises of step 10."""

from versions import Versions, Wrong, museum

VERSIONS = {
    "weight_half_of_backward": Versions(
        wrong=[
            Wrong("the second micro-batch replaces the first", "if weight.grad is None:", "if True:",
                  "after micro-batch 1"),
            Wrong("twice dW", "grad, x = entries.pop(0)\n", "grad, x = entries.pop(0)\n        grad = 2 * grad\n",
                  "the gradient of weight 0"),
            Wrong("the dtype of the activations", "(grad @ x).to(weight.dtype)", "grad @ x", "dtype"),
            Wrong("the data parallelism is not told", "model.mark_param_as_ready(weight)", "pass",
                  "was called 0 times"),
            Wrong("told with half of it", "            model.mark_param_as_ready(weight)",
                  "            weight.grad /= 2\n            model.mark_param_as_ready(weight)\n"
                  "            weight.grad *= 2", "when mark_param_as_ready is called"),
            Wrong("two dims before the last always", "grad.flatten(0, -2).t(), x.flatten(0, -2)",
                  "grad.flatten(0, 1).t(), x.flatten(0, 1)", "must be a matrix"),
        ],
        right='''
def add_weight_gradients(entries, model):
    for weight, dy, x in entries:
        gradient = torch.einsum("...o,...i->oi", dy.detach(), x.detach()).to(weight.dtype)
        weight.grad = gradient if weight.grad is None else weight.grad + gradient
        if weight in model.bucket_of:
            model.mark_param_as_ready(weight)
'''),
    "zero_bubble": Versions(
        wrong=[
            museum("postponed", "never does W"),
            Wrong("the oldest W stays in the queue", "yield waiting.popleft()", "yield waiting[0]", "does W0 2 times"),
            Wrong("forwards get a W, too", 'if action.kind == "B":', "if True:", "2 times"),
        ],
        right='''
def postpone_weight_gradients(actions, delay):
    """Each W at once after its B: it fills nothing, so it is slower."""
    for action in actions:
        yield action
        if action.kind == "B":
            yield Action("W", action.microbatch)
'''),
}
