"""Wrong and right answers to the exercise of step 13."""

from versions import Versions, Wrong

VERSIONS = {
    "just_in_time": Versions(
        wrong=[
            Wrong("backward does not gather", "output.register_hook(lambda gradient: self.before_backward(layer))",
                  "pass", "backward reaches decoder_layers.2"),
            Wrong("forward does not wait", "        self.gather(layer)\n        if layer in self.following:",
                  "        self.start_gather(layer)\n        if layer in self.following:", "weights are "
                      "still arriving"),
            Wrong("the rest is not gathered", "            unit.start_gather()\n        self.start_gather(self.first",
                  "            return\n        self.start_gather(self.first",
                  "forward reaches embedding, whose weights are freed"),
        ]),
}
