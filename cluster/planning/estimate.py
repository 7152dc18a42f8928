"""A pipeline's time by a formula, to choose by which candidates are worth a simulation.

    time of m micro-batches  =  fill + (m - 1) period

    fill      the first micro-batch's way through all stages and back, transfers included
    period    from then on, one micro-batch each: what the slowest stage computes, or what the busiest network carries,
              or, since 1F1B lets p - s micro-batches at most go beyond stage s: their round trip, shared among them

For AFAB the period is reckoned too short: a stage that is slow forward can't make up for it backward.
Layers of a model are alike, so a stage's time is linear in their number, and giving each next layer to the stage that
ends up fastest makes the slowest stage as fast as can be.
"""

import bisect
import heapq
from itertools import pairwise, permutations
from typing import NamedTuple

from planning.machines import Cluster
from pipeline_parallel import one_f_one_b
from planning.pipeline_simulation import Pipeline, Setting, start_of_step
from planning.simulation import live_microbatches, peak_memory


class Shape(NamedTuple):
    """A pipeline without its micro-batches; seconds. `most`: micro-batches for which its memory suffices."""

    machines: tuple[int, ...]
    layers: tuple[int, ...]
    fill: float
    period: float
    most: int

    def time(self, num_microbatches: int) -> float:
        return self.fill + (num_microbatches - 1) * self.period


class Estimate:
    """Formulas for one cluster, setting, and step of so many micro-batches. `memory`: what each machine may use."""

    def __init__(self, cluster: Cluster, setting: Setting, size: int, num_microbatches: int, memory: list[float]):
        self.cluster, self.setting, self.size, self.memory = cluster, setting, size, memory
        self.num_microbatches = num_microbatches
        first, num_layers, stop = cluster.first_layer, cluster.num_layers, len(cluster.names)
        self.layer, self.before, self.after = [], [], []  # by rank: seconds of a layer, of what is before and after
        for machine in cluster.machines:
            passed = [f + b for f, b in zip(machine.passed["F"][size], machine.passed["B"][size])]
            self.layer.append((passed[first + num_layers] - passed[first]) / num_layers)
            self.before.append(passed[first])
            self.after.append(passed[stop] - passed[first + num_layers])
        self.known: dict[tuple, list[Shape]] = {}
        message = cluster.message_bytes(size, setting.wire_dtype)
        self.carry = [[message / link.bandwidth if link else 0.0 for link in row] for row in cluster.links]

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
        if p > layers or min(limits) < 1 or sum(limits) < layers:
            return None
        each = [self.layer[rank] for rank in machines]
        besides = [2 * self.cluster.machines[rank].microbatch_overhead for rank in machines]
        besides[0] += self.before[machines[0]]
        besides[-1] += self.after[machines[-1]]
        counts, left = [1] * p, layers - p
        if floor:
            for s in sorted(range(p), key=each.__getitem__):
                more = min(left, limits[s] - 1, int((floor - besides[s]) / max(each[s], 1e-12) * (1 + 1e-9)) - 1)
                counts[s] += max(0, more)
                left -= max(0, more)
        following = [(besides[s] + (counts[s] + 1) * each[s], s) for s in range(p) if counts[s] < limits[s]]
        heapq.heapify(following)
        for _ in range(left):  # the next layer to the stage that then takes least
            seconds, s = heapq.heappop(following)
            counts[s] += 1
            if counts[s] < limits[s]:
                heapq.heappush(following, (seconds + each[s], s))
        return tuple(counts)

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
            latency = cluster.links[a][b].latency + cluster.links[b][a].latency
            around[s] = carry[a][b] + carry[b][a] + latency
            period = max(period, (around[s] + latency) / 2)  # receives are posted one action ahead, and not earlier
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
        most = self.most_microbatches(machines, layers)
        return Shape(machines, layers, fill + start, max(period, 1e-12), most)

    def most_microbatches(self, machines: tuple[int, ...], layers: tuple[int, ...]) -> int:
        """All of the step's where memory suffices for them: 1F1B needs no more for many than for a few."""
        def fits(num_microbatches: int) -> bool:
            peaks = peak_memory(self.cluster, Pipeline(machines, layers, num_microbatches), self.size, self.setting)
            return all(peak <= self.memory[rank] for rank, peak in zip(machines, peaks))

        if fits(self.num_microbatches):
            return self.num_microbatches
        return bisect.bisect_left(range(1, self.num_microbatches), True, key=lambda number: not fits(number))

    def shapes(self, group: tuple[int, ...], num_microbatches: int) -> list[Shape]:
        """The machines of a group as one pipeline, quickest first: all orders of up to four, a few plausible ones of
        more; each split into even times and, where something else takes longer, with fast machines filled first."""
        if (group, num_microbatches) not in self.known:
            found = set()
            is_small = len(group) <= 4
            for order in permutations(group) if is_small else self.plausible_orders(group):
                layers = self.split_layers(order, num_microbatches)
                if layers is None:
                    continue
                even = self.time(order, layers, num_microbatches)
                layers = self.split_layers(order, num_microbatches, floor=even.period)
                found.update((even, self.time(order, layers, num_microbatches)))
            self.known[group, num_microbatches] = sorted(found, key=lambda shape: (shape.time(num_microbatches), shape))
        return self.known[group, num_microbatches]

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
    """Micro-batches of each pipeline, so that the last to end ends early; None where there are too few, or too many."""
    if not len(shapes) <= num_microbatches <= sum(shape.most for shape in shapes) or min(s.most for s in shapes) < 1:
        return None
    rate = sum(1 / shape.period for shape in shapes)
    end = (num_microbatches - len(shapes) + sum(shape.fill / shape.period for shape in shapes)) / rate
    shares = [min(shape.most, max(1, int((end - shape.fill) / shape.period + 1 + 1e-9))) for shape in shapes]
    while (left := num_microbatches - sum(shares)) != 0:
        step = 1 if left > 0 else -1
        able = [k for k, shape in enumerate(shapes) if 1 <= shares[k] + step <= shape.most]
        shares[min(able, key=lambda k: step * shapes[k].time(shares[k] + max(step, 0)))] += step
    return shares


def pipelines_of(shapes: list[Shape], shares: list[int]) -> tuple[Pipeline, ...]:
    return tuple(Pipeline(shape.machines, shape.layers, share) for shape, share in zip(shapes, shares))
