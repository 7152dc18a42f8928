"""--check_replicas: ranks that hold the same tensor compare it. A bit that flips in one of them raises no error.

Replicas begin with the same bits and use the same sums of gradients, so weights and AdamW's averages stay the same in
every bit. Each rank makes one 64-bit checksum of each tensor, and all gather them: 8 bytes a tensor. A tensor is known
by its name and its tensor-parallel rank, because in pipelines of unlike shapes it is on unlike stages.

They compare every N steps; before anything is saved, so that they agreed on each checkpoint; before an update whose
loss is not finite, which would spoil all replicas; and in an elastic run before others are taken in, and when a
generation begins, there without the tensors that a rank has just been sent.

With --local_steps the averages belong to one replica: weights and the outer momentum are compared, at a round's end.
Where AdamW rounds otherwise on some ranks, as on unlike devices, healthy replicas differ, so the flag is refused.
"""

import collections
import os
import shlex

import torch
import torch.distributed as dist
import torch.nn.functional as F

from checkpoints.files import name_of_step
from ranks.collectives import gather, once, say
from ranks.lost import is_elastic
from ranks.placement import home_rank, host_names, machines
from run.flags import make_adamw
from run.live_state import key_of, weights_of
from utils import UserError, positive_int

WORDS = 1 << 20  # of 8 bytes, that are multiplied at a time
SHOWN = 4  # tensors of a rank in a message


class ReplicasDiffer(UserError):
    """Ends a run on all hosts: whoever went on, or was started anew, could train with what is wrong."""


def add_check_flag(parser) -> None:
    parser.add_argument("--check_replicas", type=positive_int, metavar="N",
                        help="every N steps, and before anything is saved, ranks that hold the same tensors compare "
                             "checksums of weights and averages; unlike ones end the run (default: never)")


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of (2 i + 1) * word i over the tensor's 64-bit words, modulo 2^64: an int64 without dimensions.

    The factors are odd, so that any change of a single word changes the sum. Of a word, the upper half is first added
    to the lower one without carry: else two changes of the highest bits would cancel."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    if data.numel() % 8 or data.storage_offset() % 8:
        data = F.pad(data, (0, -data.numel() % 8))
    words, total = data.view(torch.int64), torch.zeros((), dtype=torch.int64, device=data.device)
    factors = 2 * torch.arange(min(WORDS, len(words)), device=data.device) + 1
    for first in range(0, len(words), WORDS):
        part = words[first : first + WORDS]
        part = part ^ (part >> 32 & 0xFFFFFFFF)
        total += (part * factors[: len(part)]).sum() + 2 * first * part.sum()
    return total


def rounding(args, plugin) -> tuple[int, str]:
    """A checksum of what this rank's optimizer makes of fixed numbers, which is the same where ranks round alike; and
    the rank's device."""
    numbers = torch.arange(1 << 14, dtype=torch.float64) * 0.6180339887 % 1 - 0.5
    param = torch.nn.Parameter(numbers.to(plugin.device, plugin.master_dtype))
    optimizer = make_adamw(args, [("numbers", param)], make=plugin.optimizer_class)
    for step in range(1, 4):
        param.grad = (numbers * step % 1 - 0.3).to(param)
        optimizer.step()
    return checksum(param).item(), torch.cuda.get_device_name() if param.is_cuda else (
        f"a CPU with {torch.backends.cpu.get_cpu_capability()}")


class Replicas:
    """All ranks make one together in each generation. `every`: None where nothing is compared.

    Raises UserError where nothing can be. An elastic run, whose ranks change, says so and goes on; once ranks have
    rounded otherwise, it compares nothing until it starts from a checkpoint again.
    """

    def __init__(self, session):
        self.session, args, start = session, session.args, session.start
        self.entries = ("momentum_buffer",) if args.local_steps else ("exp_avg", "exp_avg_sq", "step")
        if start.memory and not start.flags.get("check_replicas"):
            args.check_replicas = None
        self.every = args.check_replicas
        if self.every:
            stage, tp_rank = session.trained.model.module, session.live.tp_rank
            self.params = {key_of(stage, name, "", tp_rank): param for name, param in stage.model.named_parameters()}
            self.tensors = weights_of(stage, tp_rank)
            kinds, self.keys = zip(*gather((rounding(args, session.trained.plugin), [*self.tensors])))
            self.begin(kinds)
        if self.every:
            self.compare(start.step, start.memory and start.memory.specs)

    def begin(self, kinds: tuple[tuple[int, str], ...]) -> None:
        """Says what is compared, or why nothing is. `kinds`: what rounding() returns on each rank."""
        holders, args = collections.Counter(key for keys in self.keys for key in keys), self.session.args
        shared, every = sum(count > 1 for count in holders.values()), args.check_replicas
        other = next((rank for rank, kind in enumerate(kinds) if kind[0] != kinds[0][0]), None)
        if shared and other is None:
            return say(f"replicas compare {shared} of {len(holders)} weights, with their {', '.join(self.entries)}, "
                       f"every {every} {'rounds' if args.local_steps else 'steps'} and before anything is saved")
        problem = "no tensor is on two ranks, as with one pipeline"
        if shared:
            problem = (f"the optimizer rounds otherwise on rank {other} ({kinds[other][1]}) than on rank 0 "
                       f"({kinds[0][1]}), so healthy replicas differ in their last bits")
            args.check_replicas = None  # the next generation reads it in what this one holds
        if not is_elastic():
            raise UserError(f"--check_replicas {every} compares the bits of replicas, but {problem}: leave it out")
        say(f"replicas are not compared: {problem}")
        self.every = None

    def after_step(self, step: int, is_due: bool) -> None:
        """`is_due`: something is saved next, or others are taken in. Raises ReplicasDiffer. Collective."""
        if self.every and (is_due or step % self.every == 0):
            self.compare(step)

    def before_update(self, step: int, *sums: torch.Tensor) -> None:
        """`sums`: loss and gradient norm of the step that the optimizer is about to make. As above."""
        if self.every and not all(total.isfinite() for total in sums):
            self.compare(step - 1)

    def compare(self, step: int, held: list[dict[tuple, tuple]] | None = None) -> None:
        """`held`: by their keys, the tensors of each rank that it has not just been sent (None: all). Raises
        ReplicasDiffer, on all ranks. Collective."""
        none, state, own = torch.zeros((), dtype=torch.int64), self.session.trained.optimizer.state, []
        for key, tensor in self.tensors.items():
            entries = state.get(self.params.get(key), {})
            own += [checksum(tensor), *(checksum(entries[each]) if each in entries else none for each in self.entries)]
        own = torch.stack([each.to(self.session.trained.plugin.device) for each in own]).cpu()
        longest = max(map(len, self.keys)) * (1 + len(self.entries))
        rows = [own.new_empty(longest) for _ in self.keys]
        dist.all_gather(rows, F.pad(own, (0, longest - len(own))), group=self.session.stop_agreement.group)
        found = collections.defaultdict(dict)  # what is compared -> rank -> checksum
        for rank, row in enumerate(rows):
            compared = [(entry, *key) for key in self.keys[rank] for entry in ("", *self.entries)]
            for (entry, *key), value in zip(compared, row.tolist()):
                if held is None or tuple(key) in held[rank]:
                    found[entry, *key][rank] = value
        if unlike := {what: sums for what, sums in found.items() if len({*sums.values()}) > 1}:
            self.session.checkpointer.wait()
            if not step:
                raise ReplicasDiffer(f"before step 1, {who_differs(unlike)}: weights were drawn on processors that "
                                     "round otherwise, or read from unlike files. Give all the same by --init_from")
            raise ReplicasDiffer(f"after step {step} {who_differs(unlike)}. The training stops, and saves nothing. "
                                 f"Test the memory of that machine. {once(home_rank(), self.last_good)}")

    def last_good(self) -> str:
        start, written = self.session.start, self.session.checkpointer.written
        path = os.path.join(start.disks.folder, name_of_step(written)) if written else (
            start.found and not start.memory and os.path.abspath(start.found.path))
        return f"The last good checkpoint: --resume {shlex.quote(path)}" if path else "No checkpoint was saved yet"


def who_differs(unlike: dict[tuple, dict[int, int]]) -> str:
    """`unlike`: for each tensor whose replicas differ, (entry, name, "", tp_rank), the checksum of each rank."""
    hosts, found = host_names(machines()), collections.defaultdict(list)
    for (entry, name, *_), sums in unlike.items():
        (value, count), *_ = collections.Counter(sums.values()).most_common()
        is_known = 2 * count > len(sums)
        suspects = tuple(rank for rank in sums if not (is_known and sums[rank] == value))
        found[suspects, is_known].append(f"{name}{entry and f' ({entry})'}")
    said = []
    for (ranks, is_known), names in found.items():
        names = ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")
        where = " and ".join(f"rank {rank} on {hosts[rank]}" for rank in ranks)
        said.append(f"{where} differ{'s' * (len(ranks) == 1)}{' from most replicas' * is_known} in {names}")
        if not is_known:
            said.append("two replicas cannot tell which of them is wrong" if len(ranks) == 2 else
                        "no majority tells which of them are wrong")
    return "; ".join(said)
