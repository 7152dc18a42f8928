"""Wrong and right answers to the exercises of step 17."""

from versions import Versions, Wrong

VERSIONS = {
    "exchange": Versions(
        wrong=[
            Wrong("the sign is turned", "start - param", "param - start", "the loss of step 3"),
            Wrong("replicas continue from their own weights", "        param.copy_(start)\n", "", "the loss of step 3"),
            Wrong("the start stays that of the first round", "        start.copy_(param)\n", "        pass\n",
                  "the loss of step 5"),
            Wrong("a single replica has no buckets", "if self.buckets:", "if True:", "KeyError"),
        ]),
}
