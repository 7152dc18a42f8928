"""Where in forward or backward: sketches of the outputs of some modules, and of the gradients at them, by sample."""


class Inside:
    def __init__(self, models: list, names, positions):
        raise NotImplementedError


def first_wrong(a, b, replicas, noise):
    return ""
