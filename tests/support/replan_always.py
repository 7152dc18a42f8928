"""train_distributed.py in which layers move after every sixth step, to and fro, whatever the machines' speeds are."""

import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent.parent / "cluster")

import course  # noqa: E402, F401  before step 9's modules
import train_distributed  # noqa: E402
from membership.watch import end_of_elastic_run  # noqa: E402
from planning.follow import Follower, Split  # noqa: E402
from utils import one_clear_error  # noqa: E402


def decide(self: Follower, step: int) -> Split | None:
    if step % 6 == 0 and self.most_layers:
        layers = [[count - 1, *own, last + 1] if count > 1 else [count + 1, *own, last - 1]
                  for count, *own, last in (each for each in self.split.layers if len(each) > 1)]
        self.split = Split([*(each for each in self.split.layers if len(each) == 1), *layers], self.split.samples)
        self.moved = []
        return self.split


Follower.decide = decide
if __name__ == "__main__":
    with one_clear_error(out_of_memory="lower --batch_size"), end_of_elastic_run():
        train_distributed.main()
