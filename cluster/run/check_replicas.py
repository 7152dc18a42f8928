"""--check_replicas: ranks that hold the same tensor compare it. A flipped bit, in memory or in a faulty core, fails
without a message: only the replica that has it differs from the others.

Replicas start from the same bits and add the same sums of gradients, so weights and AdamW's averages stay the same in
every bit where ranks round alike. Each rank makes one 64-bit checksum of each tensor and all gather them: 8 bytes a
tensor. Tensors are matched by name and tensor-parallel rank, as pipelines of unlike shapes hold them on other ranks.

It is done every N steps and before anything is saved, so each checkpoint is one on which the replicas agreed; and
before a step whose loss is not finite, as its gradients would make all replicas alike again. In an elastic run it is
also done before others are taken in, and by those that were there when a generation begins.

With --local_steps the averages belong to one replica each: weights and the outer momentum are compared where a round
ends. Where one rank's AdamW rounds otherwise than another's, on unlike devices, weights part slowly without a fault.
"""

import collections
import os
import shlex

import torch
import torch.distributed as dist
import torch.nn.functional as F

from checkpoints.files import name_of_step
from ranks.collectives import gather, say
from ranks.lost import is_elastic
from ranks.placement import from_home, host_names, machines
from run.flags import make_adamw
from run.live_state import weights_of
from utils import UserError, positive_int

WORDS = 1 << 20  # of 8 bytes that are multiplied at a time
SHOWN = 4  # tensors in a message


class ReplicasDiffer(UserError):
    """Ends a run on all hosts: whoever went on, or was started anew, would train with what is wrong."""


def add_check_flag(parser) -> None:
    parser.add_argument("--check_replicas", type=positive_int, metavar="N",
                        help="every N steps, and before anything is saved, ranks that hold the same tensors compare "
                             "checksums of weights and averages; unlike ones end the run (default: never)")


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of (2 i + 1) * word i over the tensor's 64-bit words, modulo 2^64, as an int64 of no dimension.

    The factors are odd, so no change of a single word leaves the sum as it was."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -data.numel() % 8))
    words, total = data.view(torch.int64), torch.zeros((), dtype=torch.int64, device=data.device)
    factors = torch.arange(1, 2 * min(WORDS, len(words)), 2, device=data.device)
    for first in range(0, len(words), WORDS):
        part = words[first : first + WORDS]
        total += (part * factors[: len(part)]).sum() + 2 * first * part.sum()
    return total


def rounding(args, plugin) -> tuple[str, int]:
    """The device, and a checksum of what its optimizer makes of fixed numbers: alike where ranks round alike."""
    numbers = torch.arange(1 << 14, dtype=torch.float64) * 0.6180339887 % 1 - 0.5  # exact, so the same everywhere
    param = torch.nn.Parameter(numbers.to(plugin.device, plugin.master_dtype))
    optimizer = make_adamw(args, [("probe", param)], make=plugin.optimizer_class)
    for step in range(1, 4):
        param.grad = (numbers * step % 1 - 0.3).to(param)
        optimizer.step()
    device = torch.cuda.get_device_name() if param.is_cuda else torch.backends.cpu.get_cpu_capability()
    return device, checksum(param).item()


class Replicas:
    """The ranks of a generation that hold the same tensors. All ranks make one together, once a stage has its weights.

    Raises UserError where there is nothing to compare, or ranks round otherwise; an elastic run, whose ranks change,
    says so instead and goes on, without a comparison from then on in the second case.
    """

    def __init__(self, session):
        self.session, self.entries = session, ("exp_avg", "exp_avg_sq", "step")
        args, plugin, origin, every = session.args, session.trained.plugin, session.start.origin, None
        if args.local_steps:
            self.entries = "momentum_buffer",
        if args.check_replicas and origin.is_in_memory and not origin.flags.get("check_replicas"):
            args.check_replicas = None  # ranks had rounded otherwise before, and still hold what came of it
        if args.check_replicas:
            self.tensors = weights_of(session.trained.model.module, session.tp_rank)
            facts = gather((rounding(args, plugin), [*self.tensors], not origin.is_in_memory or
                            session.generation.has_state))
            every = self.agree([kind for kind, *_ in facts], [keys for _, keys, _ in facts])
        self.every = every
        if every and origin.step:
            self.compare(origin.step, [keys if is_there else [] for _, keys, is_there in facts])

    def agree(self, kinds: list[tuple[str, int]], keys: list[list[tuple]]) -> int | None:
        """The number of steps from one comparison to the next, None for no comparison."""
        args, self.keys = self.session.args, keys
        counts, problem = collections.Counter(key for each in keys for key in each), None
        shared = [key for key, count in counts.items() if count > 1]
        if not shared:
            problem = "each tensor is held by one rank alone: nothing can be compared. Add a pipeline, or leave it out"
        other = next((rank for rank, kind in enumerate(kinds) if kind[1] != kinds[0][1]), None)
        if shared and other is not None:
            problem = (f"AdamW rounds otherwise on rank {other} ({kinds[other][0]}) than on rank 0 ({kinds[0][0]}), so "
                       "that healthy replicas differ in their last bits: leave it out")
        if not problem:
            say(f"every {args.check_replicas} {'rounds' if args.local_steps else 'steps'}, and before anything is "
                f"saved, replicas compare {len(shared)} of {len(counts)} tensors, "
                f"each with its {', '.join(self.entries)}")
            return args.check_replicas
        if not is_elastic():
            raise UserError(f"--check_replicas {args.check_replicas}, but {problem}")
        say(f"replicas are not compared: {problem}")
        if shared:
            args.check_replicas = None  # which the next generation is told by what this one's state says
        return None

    def after_step(self, step: int, is_due: bool) -> None:
        """`is_due`: something is saved next, or others are taken in. Raises ReplicasDiffer. Collective."""
        if self.every and (is_due or step % self.every == 0):
            self.compare(step, self.keys)

    def before_update(self, step: int, *sums: torch.Tensor) -> None:
        """Before the optimizer takes a step whose `sums`, loss and gradient norm, may not be finite. Collective."""
        if self.every and not all(total.isfinite() for total in sums):
            self.compare(step - 1, self.keys)

    def compare(self, step: int, keys: list[list[tuple]]) -> None:
        """`keys`: those that are compared, of each rank. Raises ReplicasDiffer, on all ranks. Collective."""
        state, params = self.session.trained.optimizer.state, {}
        for group in self.session.trained.optimizer.param_groups:
            params |= {param.data_ptr(): param for param in group["params"]}
        none, mine = torch.zeros((), dtype=torch.int64, device=self.session.trained.plugin.device), []
        for tensor in self.tensors.values():
            entries = state.get(params.get(tensor.data_ptr()), {})
            sums = [checksum(entries[name]) if name in entries else none for name in self.entries]
            mine += [checksum(tensor), *(each.to(none.device) for each in sums)]
        width = 1 + len(self.entries)
        longest = width * max(map(len, self.keys))
        row = F.pad(torch.stack(mine).cpu(), (0, longest - len(mine)))
        rows = [torch.empty_like(row) for _ in self.keys]
        dist.all_gather(rows, row, group=self.session.stop_agreement.group)
        found = collections.defaultdict(dict)  # (tensor, entry) -> rank -> checksum
        for rank, each in enumerate(rows):
            values = iter(each.tolist())
            for name, _, tp_rank in keys[rank]:
                for entry in ("", *self.entries):
                    found[name, entry, tp_rank][rank] = next(values)
        if unlike := {key: sums for key, sums in found.items() if len(set(sums.values())) > 1}:
            self.session.checkpointer.wait()
            raise ReplicasDiffer(from_home(lambda: self.what_differs(step, unlike)))

    def what_differs(self, step: int, unlike: dict[tuple, dict[int, int]]) -> str:
        hosts, found = host_names(machines()), collections.defaultdict(list)
        for (name, entry, _), sums in unlike.items():
            [(value, count), *_] = collections.Counter(sums.values()).most_common()
            is_known = 2 * count > len(sums)
            found[tuple(rank for rank in sums if not is_known or sums[rank] != value), is_known].append(
                f"{name} ({entry})" if entry else name)
        said = []
        for (ranks, is_known), names in found.items():
            where = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            said.append(f"{where} {'differs from the others' if is_known else 'differ'} in "
                        f"{', '.join(names[:SHOWN])}{more}")
            if not is_known:
                said.append("two replicas cannot tell which of them is wrong" if len(ranks) == 2 else
                            "there is no majority that tells which of them are wrong")
        return (f"after step {step} replicas hold unlike numbers: {'; '.join(said)}. The training stops, and saves "
                f"nothing. {self.what_next()}")

    def what_next(self) -> str:
        session = self.session
        if written := session.checkpointer.written:
            path = os.path.join(session.start.folder, name_of_step(written))
        elif session.start.origin.found and not session.start.origin.is_in_memory:
            path = session.start.origin.found.path
        else:
            return "No checkpoint was saved yet: test that machine's memory, and begin anew"
        return f"Test that machine's memory, then go on from the last good checkpoint: --resume {shlex.quote(path)}"
