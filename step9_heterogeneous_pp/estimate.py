"""A pipeline's time by a formula, to choose by which candidates are worth a simulation.

    time of m micro-batches  =  fill + (m - 1) period

    fill      the first micro-batch's way through all stages and back, transfers included
    period    from then on, one micro-batch each: what the slowest stage computes, or what the busiest network carries,
              or, since 1F1B lets p - s micro-batches at most go beyond stage s: their round trip, shared among them

Layers of a model are alike, so a stage's time is linear in their number, and giving each next layer to the stage that
ends up fastest makes the slowest stage as fast as can be.
"""

from itertools import permutations, pairwise
from typing import NamedTuple

from machines import Cluster
from pipeline_parallel import one_f_one_b
from pipeline_simulation import Pipeline, Setting, start_of_step
from simulation import live_microbatches


class Shape(NamedTuple):
    """A pipeline without its micro-batches; seconds."""

    machines: tuple[int, ...]
    layers: tuple[int, ...]
    fill: float
    period: float

    def time(self, num_microbatches: int) -> float:
        return self.fill + (num_microbatches - 1) * self.period


class Estimate:
    """Formulas for one cluster, one setting, one micro-batch size. `memory`: bytes that each machine may use."""

    def __init__(self, cluster: Cluster, setting: Setting, size: int, memory: list[float]):
        self.cluster, self.setting, self.size, self.memory = cluster, setting, size, memory
        first, num_layers, stop = cluster.first_layer, cluster.num_layers, len(cluster.names)
        self.layer, self.before, self.after = [], [], []  # by rank: seconds of a layer, of what is before and after
        for machine in cluster.machines:
            passed = [f + b for f, b in zip(machine.passed["F"][size], machine.passed["B"][size])]
            self.layer.append((passed[first + num_layers] - passed[first]) / num_layers)
            self.before.append(passed[first])
            self.after.append(passed[stop] - passed[first + num_layers])
        message = cluster.message_bytes(size, setting.wire_dtype)
        self.carry = [[message / link.bandwidth if link else 0.0 for link in row] for row in cluster.links]
        self.whole = cluster.stages((num_layers,))[0]

    def speed(self, rank: int) -> float:
        """Micro-batches a second that a machine could compute alone."""
        seconds = self.before[rank] + self.cluster.num_layers * self.layer[rank] + self.after[rank]
        return 1 / max(seconds + 2 * self.cluster.machines[rank].microbatch_overhead, 1e-12)

    def most_layers(self, rank: int, stage: int, num_stages: int, num_microbatches: int) -> int:
        """Decoder layers that the memory of a machine holds as this stage; -1: not even what it has besides them."""
        cluster = self.cluster
        first, layers, stop = cluster.first_layer, cluster.num_layers, len(cluster.names)
        live = live_microbatches(self.setting.schedule, stage, num_stages, num_microbatches)

        def num_bytes(start: int, end: int) -> float:
            parameters = cluster.parameters_before[end] - cluster.parameters_before[start]
            return 4 * parameters * cluster.master_bytes + live * cluster.saved_bytes((start, end), self.size)

        besides = 4 * self.size * cluster.hidden_bytes if num_stages > 1 else 0.0
        besides += num_bytes(0, first) if stage == 0 else 0.0
        besides += num_bytes(first + layers, stop) if stage == num_stages - 1 else 0.0
        if stage in (0, num_stages - 1):
            besides += 4 * cluster.tied_parameters * cluster.master_bytes
        left, layer = self.memory[rank] - besides, num_bytes(first, first + layers) / layers
        return -1 if left < 0 else min(layers, int(left / layer * (1 + 1e-9))) if layer else layers

    def split_layers(self, machines: tuple[int, ...], num_microbatches: int, floor: float = 0.0) -> tuple | None:
        """Layers of each stage, the slowest of them as fast as can be; None where memory or layers do not suffice.

        `floor`: seconds that a micro-batch takes anyway. Up to there the fastest machines are filled first.
        """
        p, layers = len(machines), self.cluster.num_layers
        limits = [self.most_layers(rank, s, p, num_microbatches) for s, rank in enumerate(machines)]
        if min(limits) < 1 or sum(limits) < layers:
            return None
        counts, each = [1] * p, [self.layer[rank] for rank in machines]
        besides = [2 * self.cluster.machines[rank].microbatch_overhead for rank in machines]
        besides[0] += self.before[machines[0]]
        besides[-1] += self.after[machines[-1]]
        for _ in range(layers - p):
            times = [(besides[s] + (counts[s] + 1) * each[s], s) for s in range(p) if counts[s] < limits[s]]
            quick = [(each[s], s) for time, s in times if time <= floor]
            counts[min(quick or times)[1]] += 1
        return tuple(counts)

    def shape(self, machines: tuple[int, ...], num_microbatches: int) -> Shape | None:
        """The better of two splits: even times, and, where something else takes longer, fast machines first."""
        if len(machines) > self.cluster.num_layers:
            return None
        layers = self.split_layers(machines, num_microbatches)
        if layers is None:
            return None
        even = self.time(machines, layers, num_microbatches)
        layers = self.split_layers(machines, num_microbatches, floor=even.period)
        return min(even, self.time(machines, layers, num_microbatches), key=lambda s: s.time(num_microbatches))

    def time(self, machines: tuple[int, ...], layers: tuple[int, ...], num_microbatches: int) -> Shape:
        cluster, p, carry = self.cluster, len(machines), self.carry
        seconds = [count * self.layer[rank] + 2 * cluster.machines[rank].microbatch_overhead
                   for rank, count in zip(machines, layers)]
        seconds[0] += self.before[machines[0]]
        seconds[-1] += self.after[machines[-1]]
        period = max(seconds)
        sent, received = [0.0] * p, [0.0] * p
        around = [0.0] * p  # from stage s to s + 1 and back
        for s, (a, b) in enumerate(pairwise(machines)):
            around[s] = carry[a][b] + carry[b][a] + cluster.links[a][b].latency + cluster.links[b][a].latency
            for sender, receiver, time in (s, s + 1, carry[a][b]), (s + 1, s, carry[b][a]):
                sent[sender] += time
                received[receiver] += time
        period = max(period, *sent, *received)
        fill = 0.0
        for s in reversed(range(p)):
            fill += seconds[s] + around[s]
            if self.setting.schedule is one_f_one_b:
                period = max(period, fill / min(p - s, num_microbatches))
        start = max(start_of_step(cluster, *pair) for pair in zip(machines, cluster.stages(layers)))
        return Shape(machines, layers, fill + start, max(period, 1e-12))

    def best_shape(self, group: tuple[int, ...], num_microbatches: int) -> Shape | None:
        """The machines of a group in the best order found: all orders of up to four, a few plausible ones of more."""
        orders = permutations(group) if len(group) <= 4 else self.plausible_orders(group)
        shapes = [shape for order in orders if (shape := self.shape(tuple(order), num_microbatches))]
        return min(shapes, key=lambda shape: shape.time(num_microbatches), default=None)

    def plausible_orders(self, group: tuple[int, ...]) -> set[tuple[int, ...]]:
        """By speed, by memory (the first stages hold most activations), and from neighbour to nearest neighbour."""
        orders = {tuple(sorted(group, key=key)) for key in (
            self.speed, lambda rank: -self.speed(rank), lambda rank: -self.memory[rank],
            lambda rank: self.memory[rank] * self.layer[rank])}
        for first in group:
            path, left = [first], set(group) - {first}
            while left:
                path.append(min(left, key=lambda rank: (self.carry[path[-1]][rank] + self.carry[rank][path[-1]], rank)))
                left.remove(path[-1])
            orders.update((tuple(path), tuple(reversed(path))))
        return orders

    def gradient_seconds(self, shapes: list[Shape]) -> float:
        """What the gradients' sums add to a step: those of the machine with most of them, less what backward hides."""
        n, cluster, worst = len(shapes), self.cluster, 0.0
        if n == 1:
            return 0.0
        for shape in shapes:
            others = [other.machines[0] for other in shapes if other is not shape]
            for rank, stage, layers in zip(shape.machines, cluster.stages(shape.layers), shape.layers):
                links = [cluster.links[rank][other] for other in others]
                num_bytes = cluster.gradient_bytes(cluster.parameters_of(stage), self.setting.gradient_wire_dtype)
                seconds = 2 * (n - 1) * (num_bytes / n / min(link.bandwidth for link in links)
                                         + 8 * max(link.latency for link in links))
                worst = max(worst, seconds / 8, seconds - layers * self.layer[rank] / 2)  # a bucket is seen at least
        return worst


def share_out(shapes: list[Shape], num_microbatches: int) -> list[int] | None:
    """Micro-batches of each pipeline, so that the last to end ends early; None where one would have none."""
    if num_microbatches < len(shapes):
        return None
    rate = sum(1 / shape.period for shape in shapes)
    end = (num_microbatches - len(shapes) + sum(shape.fill / shape.period for shape in shapes)) / rate
    shares = [int((end - shape.fill) / shape.period + 1 + 1e-9) for shape in shapes]
    if min(shares) < 1:
        return None
    for _ in range(num_microbatches - sum(shares)):
        quickest = min(range(len(shapes)), key=lambda k: shapes[k].time(shares[k] + 1))
        shares[quickest] += 1
    return shares


def pipelines_of(shapes: list[Shape], shares: list[int]) -> tuple[Pipeline, ...]:
    return tuple(Pipeline(shape.machines, shape.layers, share) for shape, share in zip(shapes, shares))
