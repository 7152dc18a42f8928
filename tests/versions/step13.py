"""Wrong and right answers to the exercise of step 13; see test_exercises.py."""

from exercise_versions import Versions, Wrong

VERSIONS = {
    "just_in_time": Versions(
        wrong=[
            Wrong("backward does not gather", "output.register_hook(lambda gradient: self.before_backward(layer))",
                "pass",
                  "backward reaches decoder_layers.2"),
            Wrong("forward does not wait", "        self.units[layer].gather()\n        if layer in self.following:",
                  "        self.units[layer].start_gather()\n        if layer in self.following:", "weights are "
                      "still arriving"),
            Wrong("the rest is not gathered", "        self.rest.start_gather()\n", "        return\n",
                  "forward reaches embedding, whose weights are freed"),
        ],
        right='''
class FullyShardedDataParallel(Zero):
    """Wraps a model without a pipeline, as Zero does. All memory but that of two layers and the rest is divided."""

    def __init__(self, module: nn.Module):
        super().__init__(module, level=3)
        module.register_forward_pre_hook(self.before_forward)
        for layer in module.decoder_layers:
            layer.register_forward_pre_hook(self.before_layer)
            layer.register_forward_hook(self.after_layer)

    def initialize_buckets(self, params: list[nn.Parameter], limit: float) -> None:
        """A unit for each layer, from the last one to the first, as backward has their gradients; and the rest."""
        layers, self.units = list(self.module.decoder_layers), {}
        for layer in reversed(layers):
            self.units[layer] = Unit([*layer.parameters()], self.module.dtype)
        in_layers = {param for layer in layers for param in layer.parameters()}
        self.rest = Unit([param for param in params if param not in in_layers], params[0].dtype)
        self.buckets = [*self.units.values(), self.rest]
        self.bucket_of = {param: unit for unit in self.buckets for param in unit.params}
        self.following = dict(zip(layers, layers[1:]))  # layer -> the next one
        self.previous = dict(zip(layers[1:], layers))

    def before_forward(self, module, args):
        self.rest.gather()

    def before_layer(self, layer, args):
        self.units[layer].gather()  # right, but nothing computes while the weights arrive

    def after_layer(self, layer, args, output):
        self.units[layer].free()
        if output.requires_grad:
            output.register_hook(lambda gradient: self.units[layer].gather())

    def gather_weights(self) -> None:
        """The next forward gathers what the optimizer has updated. Weights that are still there are the old ones."""
        for unit in self.buckets:
            unit.free()
'''),
}
