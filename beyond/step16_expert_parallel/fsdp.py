"""Fully sharded data parallelism (ZeRO 3): weights, too, are kept as shards, and gathered when a layer needs them.

A rank owns a shard of each decoder layer, and of the rest (the embedding, the final norm and projection), with its
gradient and its two averages. The weights of a layer exist for as long as it computes:

    forward     gather layer 0 | compute 0, gather 1 | compute 1, gather 2 | ...     each is freed when it has computed
    backward    ... | compute 1, gather 0 | compute 0, scatter the gradients of 1 |  each is freed when it has computed

The rest is gathered for a whole optimizer step, since some micro-batch needs it almost all of the time. Without a
pipeline, the last layer stays from its forward to its backward, which is next. In a pipeline the same happens in each
chunk's forward and backward (B); W computes without weights. With `gather_once`, weights stay from their first use to
the end of the step, and gradients add up until then, as with ZeRO 1: a pipeline has many small micro-batches.

The model contains none of this: hooks gather before a layer's forward and before its backward. Memory is freed by
resizing a storage to zero bytes. Autograd keeps tensors that share this storage, and finds the weights in it again.

A layer's weights are sent and used in the dtype of the activations, and its gradients are summed in that of the
masters. The embedding looks up in the masters' dtype, as in model.py, so the rest is gathered in that.
"""

import math

import torch
import torch.nn as nn

import model as llama
import process_group_manager as pgm
from data_parallel import Bucket
from timeline import timeline
from zero import ShardedBucket, Zero, all_gather


class Unit(ShardedBucket):
    """Parameters that are gathered and freed together. While they are freed, a rank has its shard only."""

    def __init__(self, params: list[nn.Parameter], replicas: pgm.Replicas, shares: list[int], dtype: torch.dtype):
        super().__init__(params, replicas, shares)
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

    def take(self, param: nn.Parameter) -> None:
        """Adds `param.grad` to a buffer in the masters' dtype, which it may not have itself, and gives it up."""
        self.gradients = self.gradients or Bucket(self.params, self.group, self.shard.dtype)
        self.gradients.views[param] += param.grad
        param.grad = None


class FullyShardedDataParallel(Zero):
    """Wraps a model, as Zero does. All memory but that of two layers and the rest is divided, unless `gather_once`."""

    def __init__(self, module: nn.Module, shares: list[int] | None = None, gather_once: bool = False):
        self.gather_once = gather_once
        super().__init__(module, 1 if gather_once else 2, shares)
        module.register_forward_pre_hook(self.before_forward)
        for layer in self.units:
            layer.register_forward_pre_hook(self.before_layer)
            layer.register_forward_hook(self.after_layer)

    def initialize_buckets(self, params: list[nn.Parameter], limit: float) -> None:
        """A unit for each layer; and for the rest, of which the norm and a tied embedding may have sums of their own.
        """
        layers, self.first, self.following, self.previous = self.module.decoder_layers, [], {}, {}
        in_layers = {param for layer in layers.values() for param in layer.parameters()}
        super().initialize_buckets([param for param in params if param not in in_layers], math.inf)
        self.rest = [*self.buckets]
        self.units = {}
        for layer in layers.values():  # experts are divided over other ranks, so they are a unit of their own
            experts = [param for param in layer.parameters() if self.kinds[param] == "expert"]
            others = [param for param in layer.parameters() if self.kinds[param] != "expert"]
            self.units[layer] = [self.make_bucket(each, self.module.dtype) for each in (others, experts) if each]
            self.buckets += self.units[layer]
        self.bucket_of = {param: unit for unit in self.buckets for param in unit.params}
        for chunk in self.module.chunks:
            chunk = [layers[str(i)] for i in chunk]
            self.first.append(chunk[0])
            self.following.update(zip(chunk, chunk[1:]))  # layer -> the next one
            self.previous.update(zip(chunk[1:], chunk))

    def make_bucket(self, params: list[nn.Parameter], dtype: torch.dtype | None = None) -> Unit:
        return Unit(params, *self.division(params), dtype or params[0].dtype)

    def before_forward(self, module: nn.Module, args: tuple) -> None:
        for unit in self.rest:
            unit.start_gather()
        self.start_gather(self.first[args[1]])  # of the chunk
        for unit in self.rest:
            unit.gather()

    def before_layer(self, layer: nn.Module, args: tuple) -> None:
        """Before a layer's forward: its weights are there, and those of the next one on their way."""
        self.gather(layer)
        if layer in self.following:
            self.start_gather(self.following[layer])
        x = args[0]
        if layer not in self.previous and x.requires_grad:
            x.register_hook(lambda gradient: self.free(layer))  # its backward has ended

    def after_layer(self, layer: nn.Module, args: tuple, output: torch.Tensor) -> None:
        """After a layer's forward. When backward arrives at the layer, it has the gradient of the output."""
        if layer in self.following or pgm.process_group_manager.pp_world_size > 1:
            self.free(layer)
        if output.requires_grad:
            output.register_hook(lambda gradient: self.before_backward(layer))

    def before_backward(self, layer: nn.Module) -> None:
        """Before a layer's backward, when the next one's has ended: its weights are there, the previous ones coming."""
        if layer in self.following:
            self.free(self.following[layer])
        self.gather(layer)
        if layer in self.previous:
            self.start_gather(self.previous[layer])

    def start_gather(self, layer: nn.Module) -> None:
        for unit in self.units[layer]:
            unit.start_gather()

    def gather(self, layer: nn.Module) -> None:
        for unit in self.units[layer]:
            unit.gather()

    def free(self, layer: nn.Module) -> None:
        for unit in self.units[layer] if not self.gather_once else []:
            unit.free()

    def finish_gradient_sync(self) -> None:
        super().finish_gradient_sync()
        for unit in self.buckets:
            unit.free()

    def gather_weights(self) -> None:
        """The next forward gathers what the optimizer has updated."""
