"""Wrong and right answers to the exercises of step 10; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "backward_of_the_input": Versions(
        wrong=[
            Wrong("the transpose is forgotten the other way", "grad @ copy", "grad @ copy.t()", "shapes cannot be"),
            Wrong("nothing is postponed", "postponed.append((ctx.weight, grad, x))", "pass", "puts 0 entries"),
            Wrong("the weight's gradient is computed now", "postponed.append((ctx.weight, grad, x))",
                  "postponed.append((ctx.weight, grad, x)); "
                  "ctx.weight.grad = grad.flatten(0, -2).t() @ x.flatten(0, -2)", "fills the weight's gradient"),
            Wrong("dx is kept for W", "(ctx.weight, grad, x)", "(ctx.weight, grad @ copy, x)", "dy and x in the entry"),
            Wrong("one value is returned", "return grad @ copy, None, None", "return grad @ copy",
                  "incorrect number of gradients"),
        ],
        right='''
@staticmethod
def backward(ctx, grad):
    x, weight = ctx.saved_tensors
    postponed.extend([(ctx.weight, grad.clone(), x)])
    return torch.einsum("...o,oi->...i", grad, weight), None, None
'''),
    "weight_half_of_backward": Versions(
        wrong=[
            Wrong("the second micro-batch replaces the first", "if weight.grad is None:", "if True:",
                  "after micro-batch 1"),
            Wrong("the dtype of the activations", "(grad @ x).to(weight.dtype)", "grad @ x", "dtype"),
            Wrong("the data parallelism is not told", "model.mark_param_as_ready(weight)", "pass",
                  "was called 0 times"),
            Wrong("it is told for all weights", "if weight in model.bucket_of:", "if True:", "was called 6 times"),
            Wrong("x and dy are exchanged", "weight.grad = (grad @ x)", "weight.grad = (grad @ x).t()",
                  "gradient of size '[4, 5]'"),
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
            Wrong("the last ones are forgotten", "yield from waiting", "pass", "never does W"),
            Wrong("the oldest W stays in the queue", "yield waiting.popleft()", "yield waiting[0]", "does W0 2 times"),
            Wrong("forwards get a W, too", 'if action.kind == "B":', "if True:", "2 times"),
            Wrong("nothing is divided", "waiting.append(action._replace(kind=\"W\"))", "continue", "yields no W"),
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
