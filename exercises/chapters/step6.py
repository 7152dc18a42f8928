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


@exercise("6", "data_parallel.DataParallelBucket.mark_param_as_ready", hints=(
    "bucket.awaited is the set of the parameters whose gradients this bucket still lacks.",
    "Go through self.buckets from the first one, and stop at the first that still lacks a gradient.",
    "On the way, launch those that have not been launched: their handle is None. One call can launch several buckets."),
    blank=("if not self.require", "bucket.awaited.discard", "for each"), wrong=[
    ("a bucket does not wait for those before it", "            break\n", "            continue\n",
     "the gradients a have arrived"),
    ("only the bucket of this gradient is launched", "for each in self.buckets:", "for each in [bucket]:",
     "the gradients a have arrived"),
    ("buckets are sent in each micro-batch", "if not self.require_backward_grad_sync:", "if False:",
     "In the first of two micro-batches"),
    ("three buckets always", "in self.buckets:", "in self.buckets[:3]:", "[0, 1, 2]")])
def buckets_in_order(attempt):
    """Launch the all-reduce of each bucket as early as possible, but in the same order on all ranks.

    Backward calls mark_param_as_ready(param) whenever a gradient is complete for this micro-batch. Only in the backward
    of the last micro-batch (self.require_backward_grad_sync is True) the gradient is complete for the optimizer step,
    and may be sent. self.buckets are the buckets in the order in which all ranks have to launch them:

        gradients arrive    bucket 1, bucket 0,  bucket 1 is now complete,    bucket 0 is now complete
        launched                                 nothing: 0 comes first       0, and at once 1 behind it

    A bucket may be launched once all of its gradients are there and all buckets before it have been launched. Then it
    has to be launched at once. A bucket has

        bucket.awaited            the set of its parameters whose gradients are still missing. You discard(param) it
                                  there; bucket.take(param), above, only copies the gradient into the bucket
        bucket.sync_gradient()    launches its all-reduce, in the background: nobody waits for it here
        bucket.handle             None until that
    """
    orders = ("fedcba", "abcdef", "dfcaeb", "fecdab")
    for size, limit in ((2, 80), (3, 40), (4, 80)):
        def program(modules, rank):
            wrapped, params, names = wrap(attempt, modules, limit)
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
                    held = "; ".join(f"bucket {i} holds {', '.join(each)}" for i, each in enumerate(members))
                    situation = (f"parameters a to f; {held}. In the {'last' if is_last else 'first'} of two "
                                 "micro-batches, the gradients "
                                 f"{', '.join(arrived)} have arrived.\n  The buckets launched so far")
                    own = torch.full_like(param, rank + 1.0)
                    param.grad = own if param.grad is None else param.grad.add_(own)
                    wrapped.mark_param_as_ready(param)
                    attempt.same(str(launched), str(expected), situation, rank)
                    for i, bucket in enumerate(wrapped.buckets):
                        attempt.require(not getattr(bucket.handle, "waited", False), f"rank {rank} waits for the "
                                        f"all-reduce of bucket {i}, and backward stands still: only launch it")
            expected = [*range(len(members))]
            wrapped.finish_gradient_sync()
            return {name: param.grad for name, param in params.items()}

        attempt.both(size, program, f"{size} ranks, the mean gradient")
