"""Step 6: data parallelism with buckets."""

import functools

import torch

from catalogue import exercise

SHAPES = {"a": (4,), "b": (2, 3), "c": (5,), "d": (2, 2), "e": (3,), "f": (7,)}  # a toy model's parameters, a to f


def wrap(attempt, modules, limit: float):
    """A DataParallelBucket of a toy model, with buckets of `limit` bytes; its parameters by name, and their names."""
    attempt.grid(modules, dp=modules.process_group_manager.dist.get_world_size())
    model = torch.nn.Module()
    for name, shape in SHAPES.items():
        model.register_parameter(name, torch.nn.Parameter(torch.ones(shape, dtype=torch.float64)))
    wrapped = modules.data_parallel.DataParallelBucket(model, bucket_cap_mb=limit / 1e6)
    return wrapped, dict(model.named_parameters()), {param: name for name, param in model.named_parameters()}


@exercise("6", "data_parallel.DataParallelBucket.initialize_buckets", hints=(
    "Keep a list of the parameters that wait for a bucket, and the sum of their bytes.",
    "param.numel() * param.element_size() are the bytes of a gradient. As soon as the sum has reached the limit, close "
    "the bucket and begin again with an empty list and a sum of 0.",
    "The last parameter closes its bucket as well, however small that is: size >= limit or param is params[-1]."))
def buckets(attempt):
    """Divide the parameters into buckets.

    `params` are the parameters in the order in which their gradients become ready. Fill one bucket after the other, in
    this order. A bucket is closed as soon as its gradients have `limit` bytes or more. The last one takes what is left.

        bytes of the gradients     32   48   40   32   24   56          with limit = 80
        buckets                   |   0     |   1     |   2     |

    Make each bucket by Bucket(its parameters, pgm.process_group_manager.dp_group), append it to self.buckets (an empty
    list at first), and note for each of its parameters self.bucket_of[param] = bucket. A gradient has as many bytes as
    its parameter: param.numel() numbers of param.element_size() bytes.
    """
    for limit in (1, 60, 80, 96, 1000):
        def program(modules, rank):
            wrapped, _, names = wrap(attempt, modules, limit)
            members = [[names[param] for param in bucket.params] for bucket in wrapped.buckets]
            owners = {name: [i for i, bucket in enumerate(wrapped.buckets) if wrapped.bucket_of.get(param) is bucket]
                      for param, name in names.items()}
            return str(members), str(owners)

        got, _ = attempt.run(2, program)
        expected, _ = attempt.run(2, program, ours=True)
        given = " ".join(f"{name}:{8 * torch.Size(SHAPES[name]).numel()}" for name in reversed(SHAPES))
        what = f"with limit = {limit} and params, with their bytes: {given}"
        attempt.same(got[0][0], expected[0][0], f"the parameters of each bucket, {what}")
        attempt.same(got[0][1], expected[0][1], f"the numbers of the buckets that bucket_of leads to, {what}")


@exercise("6", "data_parallel.DataParallelBucket.mark_param_as_ready", hints=(
    "bucket.awaited is the set of the parameters whose gradients this bucket still lacks.",
    "Go through self.buckets from the first one, and stop at the first that still lacks a gradient.",
    "On the way, launch those that have not been launched: their handle is None. One call can launch several buckets."),
    blank=("if not self.require", "bucket.awaited.discard", "for each"))
def buckets_in_order(attempt):
    """Launch the all-reduce of each bucket as early as possible, but in the same order on all ranks.

    Backward calls mark_param_as_ready(param) whenever a gradient is complete for this micro-batch. Only in the backward
    of the last micro-batch (self.require_backward_grad_sync is True) it is complete for the optimizer step, and may be
    sent. self.buckets are the buckets in the order in which all ranks have to launch them:

        gradients arrive    bucket 1, bucket 0,  bucket 1 is now complete,    bucket 0 is now complete
        launched                                 nothing: 0 comes first       0, and at once 1 behind it

    A bucket may be launched once all of its gradients are there and all buckets before it have been launched. Then it
    has to be launched at once. A bucket has

        bucket.awaited            the set of its parameters whose gradients are still missing (a set has discard(param))
        bucket.sync_gradient()    launches its all-reduce, in the background
        bucket.handle             None until that
    """
    orders = ("fedcba", "abcdef", "dfcaeb", "fecdab")
    for size in (2, 3, 4):
        def program(modules, rank):
            wrapped, params, names = wrap(attempt, modules, 80)
            members = ["".join(names[each] for each in bucket.params) for bucket in wrapped.buckets]
            launched, expected, situation = [], [], ""

            def launch(i: int, really) -> None:
                launched.append(i)
                attempt.same(str(launched), str(expected[: len(launched)]), situation, rank)
                really()

            for i, bucket in enumerate(wrapped.buckets):
                bucket.sync_gradient = functools.partial(launch, i, bucket.sync_gradient)
            for is_last in (False, True):
                wrapped.require_backward_grad_sync = is_last
                for k, name in enumerate(orders[rank]):
                    param, arrived = params[name], orders[rank][: k + 1]
                    complete = [set(each) <= set(arrived) for each in members]
                    expected = list(range((complete + [False]).index(False))) if is_last else []
                    situation = (f"the buckets launched after the gradients {arrived} in the "
                                 f"{'last' if is_last else 'first'} of two micro-batches (the buckets hold "
                                 f"{', '.join(members)})")
                    own = torch.full_like(param, rank + 1.0)
                    param.grad = own if param.grad is None else param.grad.add_(own)
                    wrapped.mark_param_as_ready(param)
                    attempt.same(str(launched), str(expected), situation, rank)
            expected = [*range(len(members))]
            wrapped.finish_gradient_sync()
            return {name: param.grad for name, param in params.items()}

        attempt.both(size, program, f"{size} ranks, the mean gradient")


@exercise("6", "data_parallel.DataParallelBucket.finish_gradient_sync", hints=(
    "First launch what has not been launched, in the order of the buckets; only then wait for all of them.",
    "A parameter in bucket.awaited has no gradient on this rank. Other ranks may have one, so it counts as zeros.",
    "If param.grad is None, it becomes bucket.views[param], after zero_(): the buffer holds the last step's numbers."))
def finish(attempt):
    """Complete the averaging after the last backward.

    Some buckets have been launched during backward, in order. Others have not: a parameter that the loss does not use
    on this rank gets no gradient (param.grad is None), so its bucket waits for it, and those behind it wait, too.
    After finish_gradient_sync(), each param.grad has to be the mean over all ranks, where a rank without a gradient
    counts as zeros.

        bucket       0            1                        2
        rank 0       launched     launched                 launched
        rank 1       launched     lacks a gradient         complete, but not launched

    A bucket has

        bucket.awaited          the set of its parameters whose gradients have not arrived
        bucket.views[param]     the place of the gradient in the bucket's buffer, which is a tensor of param's shape. It
                                is what is sent, and it still holds the numbers of the last optimizer step
        bucket.handle           None until bucket.sync_gradient() launches the all-reduce
        bucket.wait()           waits for the all-reduce, and prepares the bucket for the next optimizer step

    All ranks have to launch the buckets in the order of self.buckets.
    """
    for size in (2, 3):
        def program(modules, rank):
            wrapped, params, _ = wrap(attempt, modules, 80)
            results = {}
            for step, unused in (("first step", ""), ("second step", "c" if rank else "f"), ("third step", "bd")):
                for name, param in reversed(params.items()):
                    param.grad = None
                    if name not in unused:
                        param.grad = torch.full_like(param, 10.0 * (rank + 1) + len(results))
                        wrapped.mark_param_as_ready(param)
                wrapped.finish_gradient_sync()
                left = [i for i, bucket in enumerate(wrapped.buckets) if bucket.handle is not None]
                attempt.require(not left, f"rank {rank}, {step}: the buckets {left} are still being sent at the end")
                attempt.require(all(param.grad is not None for param in params.values()), f"rank {rank}, {step}: a "
                                "gradient is still None, though other ranks may have one")
                results[step] = {f"the gradient of {name}{' (unused here)' * (name in unused)}": param.grad.clone()
                                 for name, param in params.items()}
            return results

        attempt.both(size, program, f"{size} ranks")
