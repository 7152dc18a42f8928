"""Fully sharded data parallelism (ZeRO 3): weights, too, are kept as shards, and gathered when a layer needs them.

A rank owns a shard of each decoder layer, and of the rest (the embedding, the final norm and projection), with its
gradient and its two averages. The weights of a layer exist for as long as it computes:

    forward     gather layer 0 | compute 0, gather 1 | compute 1, gather 2 | ...     each is freed when it has computed
    backward    ... | compute 1, gather 0 | compute 0, scatter the gradients of 1 |  each is freed when it has computed

The rest is gathered for a whole micro-batch, since it is used at both ends of the model, and tied weights at both at
once. The last layer stays from its forward to its backward, which is next.

The model contains none of this: hooks gather before a layer's forward and before its backward. Memory is freed by
resizing a storage to zero bytes. Autograd keeps tensors that share this storage, and finds the weights in it again.

A layer's weights are sent and used in the dtype of the activations, and its gradients are summed in that of the
masters. The embedding looks up in the masters' dtype, as in model.py, so the rest is gathered in that.
"""

import torch
import torch.nn as nn

import model as llama
import process_group_manager as pgm
from timeline import timeline
from zero import ShardedBucket, Zero, all_gather


class Unit(ShardedBucket):
    """Parameters that are gathered and freed together. While they are freed, a rank has its shard only."""

    def __init__(self, params: list[nn.Parameter], dtype: torch.dtype):
        grid = pgm.process_group_manager
        super().__init__(params, grid.dp_group, [1] * grid.dp_world_size)
        self.shard, self.gathering = nn.Parameter(self.shard.detach().clone()), None
        self.weights = self.weights.to(dtype, copy=True)
        for param, part in zip(params, self.weights.split([param.numel() for param in params])):
            param.data = part.view_as(param)
        self.num_bytes = self.weights.nbytes
        self.free()

    def start_gather(self) -> None:
        """Starts the all-gather, unless the weights are there already, or on their way."""
        storage = self.weights.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.num_bytes)
            self.weights.split(self.sizes)[self.group.rank()].copy_(self.shard.detach())
            handle = all_gather(self.weights, self.sizes, self.group)
            self.gathering = timeline.background(handle, "all-gather")

    def gather(self) -> None:
        """Returns when the weights are there."""
        self.start_gather()
        if self.gathering:
            with timeline.span("wait"):
                self.gathering.wait()
            self.gathering = None

    def free(self) -> None:
        assert self.gathering is None, "the weights are still arriving"
        self.weights.untyped_storage().resize_(0)
        if llama.casts:
            llama.casts.clear()  # copies of the rest's weights: autograd keeps them for as long as it needs them

    def scatter(self) -> None:
        """When backward has all gradients of the unit, it does not need the weights any more."""
        super().scatter()
        self.free()


class FullyShardedDataParallel(Zero):
    """Wraps a model without a pipeline, as Zero does. All memory but that of two layers and the rest is divided."""

    def __init__(self, module: nn.Module):
        super().__init__(module, level=3)
        module.register_forward_pre_hook(self.before_forward)
        for layer in module.decoder_layers.children():
            layer.register_forward_pre_hook(self.before_layer)
            layer.register_forward_hook(self.after_layer)

    def initialize_buckets(self, params: list[nn.Parameter], limit: float) -> None:
        """A unit for each layer, from the last one to the first, as backward has their gradients; and the rest."""
        layers, self.units = list(self.module.decoder_layers.children()), {}
        for layer in reversed(layers):
            self.units[layer] = Unit([*layer.parameters()], self.module.dtype)
        in_layers = {param for layer in layers for param in layer.parameters()}
        rest = [param for param in params if param not in in_layers]
        rest.sort(key=torch.Tensor.dim)  # the norm comes first: tp ranks sum its gradient, so its shards are alike
        self.rest = Unit(rest, params[0].dtype)
        self.buckets = [*self.units.values(), self.rest]
        self.bucket_of = {param: unit for unit in self.buckets for param in unit.params}
        self.following = dict(zip(layers, layers[1:]))  # layer -> the next one
        self.previous = dict(zip(layers[1:], layers))

    def before_forward(self, module: nn.Module, args: tuple) -> None:
        self.rest.start_gather()
        self.buckets[-2].start_gather()  # the first layer's
        self.rest.gather()

    def before_layer(self, layer: nn.Module, args: tuple) -> None:
        """Before a layer's forward: its weights are there, and those of the next one on their way."""
        self.units[layer].gather()
        if layer in self.following:
            self.units[self.following[layer]].start_gather()

    def after_layer(self, layer: nn.Module, args: tuple, output: torch.Tensor) -> None:
        """After a layer's forward. When backward arrives at the layer, it has the gradient of the output."""
        if layer in self.following:
            self.units[layer].free()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.before_backward(layer))

    def before_backward(self, layer: nn.Module) -> None:
        """Before a layer's backward: its weights are there, and those of the layer before it on their way."""
        self.units[layer].gather()
        if layer in self.previous:
            self.units[self.previous[layer]].start_gather()

    def gather_weights(self) -> None:
        """The next forward gathers what the optimizer has updated. Weights that are still there are the old ones."""
        for unit in self.buckets:
            unit.free()
