"""What a process holds of a training, and how it moves from an old layout to a new one: in memory, between ranks.

A tensor has a key: its parameter's name, "" for the parameter itself or the name of the optimizer's average, and the
tensor-parallel rank whose part it is. Each rank says which keys it holds and which ones its new stage needs; what it
has already stays where it is, and the rest is sent by one of those that have it.

A step is made by all or by none. The gradient norm's all-reduce is its commit: a rank that has passed it knows that all
gradients are complete on all ranks. So where one of the survivors has passed it, all take that step, with that norm;
otherwise nobody has changed a weight, and the step's samples are read again.
"""

import collections
import json
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from checkpoints.files import name_of_step
from checkpoints.resume import Found
from pipeline_template import names_of
from ranks.collectives import gather
from ranks.disks import Disks
from ranks.placement import is_home
from stage_weights import make_buffers

Key = tuple[str, str, int]
UNDER_WAY = 8  # tensors that a rank sends or receives at a time


class Commit(NamedTuple):
    """What all ranks know when all gradients of an optimizer step are complete."""

    step: int  # from 1 on
    loss: float  # the mean over the global batch
    grad_norm: float  # of the whole model, before it was clipped
    learning_rate: float


class LiveState:
    """What a process holds of a training. A Session makes it, and it goes on when the generation of that has ended.

    `step`: the last one that was made. `generation`: the last one in which this state was that of the run: who was cut
    off has steps that the others may have made anew, or never made. `everything`: the keys of all weights.
    """

    def __init__(self, checkpointer, generation: int, tp_rank: int, max_grad_norm: float, step: int,
                 commit: Commit | None = None, everything: frozenset[Key] = frozenset()):
        self.checkpointer, self.generation, self.everything = checkpointer, generation, everything
        self.stage, self.optimizer, self.scheduler = checkpointer.stage, checkpointer.optimizer, checkpointer.scheduler
        self.tp_rank, self.max_grad_norm = tp_rank, max_grad_norm
        self.step, self.commit, self.unfinished = step, commit, None

    def release(self, plugin) -> None:
        """Its generation has ended: lets go of all that was made for that, but for what `plugin` has not finished."""
        self.checkpointer.host, self.unfinished = [], plugin.unfinished  # the memory for copies
        for param in self.stage.model.parameters():  # hooks refer to buckets, and these to groups
            with names_of("torch"):
                (param._post_accumulate_grad_hooks or {}).clear()

    def agree(self, commits: list[Commit]) -> None:
        """Takes the step that others of the generation know to be complete, if this rank has not taken it."""
        for commit in commits:
            if commit.step == self.step + 1:
                if self.commit is None or self.commit.step != commit.step:  # else they are clipped
                    self.clip(commit.grad_norm)
                self.optimizer.step()
                self.scheduler.step()
                self.step, self.commit, self.unfinished = commit.step, commit, None

    def clip(self, norm: float) -> None:
        params = [param for param in self.stage.model.parameters() if param.grad is not None]
        if self.max_grad_norm and params:
            total = torch.tensor(norm, dtype=params[0].dtype, device=params[0].device)
            torch.nn.utils.clip_grads_with_norm_(params, self.max_grad_norm, total)

    def tensors(self) -> dict[Key, torch.Tensor]:
        found = dict(weights_of(self.stage, self.tp_rank))
        for name, param in self.stage.model.named_parameters():
            for entry, value in self.optimizer.state.get(param, {}).items():
                found[key_of(self.stage, name, entry, self.tp_rank)] = value
        return found


def key_of(stage, name: str, entry: str, tp_rank: int) -> Key:
    """A tied head is its embedding, and what an adapter is beside keeps its name."""
    name = name.replace(".base_layer.", ".")
    return stage.tied[0] if stage.tied and name in stage.tied else name, entry, tp_rank


def weights_of(stage, tp_rank: int) -> dict[Key, torch.Tensor]:
    """The parameters of a stage, and its own buffers that a checkpoint would have."""
    params = dict(stage.model.named_parameters())
    every = dict(stage.model.named_parameters(remove_duplicate=False))
    own = tuple(f"{name}." for name in stage.template.modules_per_stage[stage.stage_index])
    buffers = {name: value for name, value in stage.model.state_dict().items()
               if name not in every and name.startswith(own)}
    return {key_of(stage, name, "", tp_rank): value.detach() for name, value in (*params.items(), *buffers.items())}


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten().view(torch.uint8)


@dataclass(frozen=True)
class InMemory:
    """What all ranks hold of one step together. Gives a stage its weights, and then an optimizer its state, as
    checkpoints.resume.Loader does, as long as `generation` has the LiveState of the one before.

    `found` has the state as state.json has it. `specs`: for each rank the dtype and the shape of each key that it
    holds; a rank without keys holds nothing of the run's state, whatever it has. `commit`: of the step. `written`: the
    step of the last checkpoint.
    """

    generation: object
    disks: Disks
    device: torch.device
    found: Found
    specs: list[dict[Key, tuple]]
    commit: Commit | None
    written: int

    def move(self, wanted: set[Key]) -> dict[Key, torch.Tensor]:
        """Those tensors, on this rank's device; what it held itself is the same tensor. Collective.

        All ranks go through the same list of transfers, in which the receivers take turns, and have a few under way: so
        different links are in use at a time.
        """
        own = self.generation.live.tensors() if self.generation.live else {}
        found = {key: own[key] for key in wanted if key in own}
        needed, under_way = self.disks.gather(sorted(wanted - found.keys())), collections.deque()
        for rank, key in (each for row in zip_longest(*needed) for each in enumerate(row) if each[1]):
            holders = [other for other, spec in enumerate(self.specs) if key in spec]
            source = holders[rank % len(holders)]
            if self.disks.rank == source:
                value = own[key].detach().cpu().contiguous()
                under_way.append((dist.isend(as_bytes(value), rank, group=self.disks.group), value))
            elif self.disks.rank == rank:
                dtype, shape = self.specs[source][key]
                found[key] = torch.empty(shape, dtype=dtype)
                under_way.append((dist.irecv(as_bytes(found[key]), source, group=self.disks.group), None))
            if len(under_way) > UNDER_WAY:
                under_way.popleft()[0].wait()
        for handle, _ in under_way:
            handle.wait()
        for key in found.keys() - own.keys():
            stays = key[1] == "step" and not torch.cuda.is_initialized()
            found[key] = found[key].to("cpu" if stays else self.device)
        return found

    def weights(self, stage) -> None:
        """As plugin.configure(weights=...) calls it."""
        make_buffers(stage.model, self.device, {name for name, _, _ in self.keys})
        self.assign(stage, [*stage.model.state_dict()])

    def load_adapters(self, stage) -> None:
        self.assign(stage, [name for name in stage.model.state_dict() if ".lora_" in name])

    @property
    def keys(self) -> set[Key]:
        """Those of all that is held."""
        return {key for spec in self.specs for key in spec}

    def assign(self, stage, names: list[str]) -> None:
        """Gives the stage its tensors of these names in its model; those that nobody holds are left. Collective."""
        keys = {name: key_of(stage, name, "", pgm.process_group_manager.tp_rank) for name in names}
        values, old, made, new = self.move({*keys.values()} & self.keys), stage.model.state_dict(keep_vars=True), {}, {}
        for name, key in keys.items():
            if key in values:
                param = old[name]  # one that has two names stays one
                if isinstance(param, torch.nn.Parameter) and param not in made:
                    made[param] = torch.nn.Parameter(values[key], param.requires_grad)
                new[name] = made.get(param, values[key])
        stage.model.load_state_dict(new, strict=False, assign=True)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, stage) -> None:
        tp_rank = pgm.process_group_manager.tp_rank
        params = {key_of(stage, name, "", tp_rank): param for name, param in stage.model.named_parameters()}
        wanted = {key for key in self.keys if key[1] and (key[0], "", key[2]) in params}
        for (name, entry, rank), value in self.move(wanted).items():
            optimizer.state[params[name, "", rank]][entry] = value


def find_in_memory(generation, disks: Disks, device: torch.device) -> InMemory | None:
    """What the ranks hold as `generation` begins; None where something is held by nobody. Collective.

    It calls generation.forget() on a rank whose state is not that of the run.
    """
    live = generation.live
    everyone = disks.gather(live and (live.generation, live.step, live.commit, live.checkpointer.written))
    last = max((each[0] for each in everyone if each), default=None)
    known = [each for each in everyone if each and each[0] == last]
    if not known:
        return None
    commits = sorted({commit for _, _, commit, _ in known if commit})
    step = max([each for _, each, _, _ in known] + [commit.step for commit in commits])
    written = min(written for *_, written in known)
    if live and live.generation == last:
        live.agree(commits)
        live.checkpointer.written = written
    if live and (live.generation, live.step) != (last, step):
        generation.forget()
    live = generation.live
    specs = {key: (value.dtype, value.shape) for key, value in live.tensors().items()} if live else {}
    state = live.checkpointer.state(step) if live else {}
    rows = state.pop("records", "")
    everyone = disks.gather((specs, live and (live.everything, state), rows.count("\n")))
    everything, state = next(facts for _, facts, _ in everyone if facts)
    if not everything <= {key for each, *_ in everyone for key in each}:
        generation.forget()
        if is_home():
            print("a part of the model was on lost hosts alone: all ranks go back to the last checkpoint", flush=True)
        return None
    if live:
        live.generation = generation.number
        for param in live.stage.model.parameters():
            param.grad = None  # all have taken the step that they were for
    commit = next((each for each in commits if each.step == step), None)
    _, most_rows = max((count, rank) for rank, (*_, count) in enumerate(everyone))
    rows = disks.share(rows, most_rows)
    if commit and f'"step": {step}, "loss"' not in rows:  # no rank has come to make its row
        rows += json.dumps({**commit._asdict(), "trained_tokens": state["tokens"]}) + "\n"
    found = Found(name_of_step(step), disks.folder, {**state, "records": rows}, {})
    return InMemory(generation, disks, device, found, [each for each, *_ in everyone], commit, written)


def who_has_what(stage, tp_rank: int, host: str) -> tuple[frozenset[Key], str]:
    """The keys of all weights, and what it costs when a host is lost, in words. Collective."""
    everyone = gather((host, frozenset(weights_of(stage, tp_rank))))
    everything = frozenset().union(*(keys for _, keys in everyone))
    if all(frozenset().union(*(keys for other, keys in everyone if other != host)) == everything
           for host, _ in everyone):
        return everything, ("whichever host is lost, the others hold a copy of all: the run then goes on from their "
                            "memory")
    return everything, ("some of the model is on one host alone: where that is lost, all go back to the last "
                        "checkpoint (--save_every)")
