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
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist

import process_group_manager as pgm
from pipeline_template import names_of
from ranks.collectives import gather
from ranks.disks import Disks
from ranks.placement import is_home
from stage_weights import make_buffers

Key = tuple[str, str, int]
UNDER_WAY = 8  # tensors that a rank sends or receives at a time


class Commit(NamedTuple):
    """What all ranks know when all gradients of an optimizer step are complete."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float


class LiveState:
    """What is left of a Session when its generation has ended.

    `everything`: the keys of all weights. `generation`: the last one in which this state was that of the run: who was
    cut off has steps that the others may have made anew, or never made.
    """

    def __init__(self, session):
        checkpointer = session.checkpointer
        checkpointer.host = []  # the memory for copies
        for param in checkpointer.stage.model.parameters():  # hooks refer to buckets, and these to groups
            with names_of("torch"):
                (param._post_accumulate_grad_hooks or {}).clear()
        self.generation = session.generation.number
        self.stage, self.optimizer, self.scheduler = checkpointer.stage, checkpointer.optimizer, checkpointer.scheduler
        self.step, self.commit, self.tp_rank = session.step, session.commit, session.tp_rank
        self.everything, args = session.everything, session.args
        self.max_grad_norm = 0 if args.local_steps else args.max_grad_norm  # local steps are clipped one by one
        self.checkpointer, self.unfinished = checkpointer, session.trained.plugin.unfinished
        session.trained = session.sampler = None  # whoever describes a checkpoint needs no plugin with its buckets

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


class PeerLoader:
    """Gives a stage its weights, and then an optimizer its state, as checkpoints.resume.Loader does, from memory.

    `held`: of this rank, or None. `specs`: for each rank the dtype and the shape of each key that it holds.
    """

    def __init__(self, held: LiveState | None, specs: list[dict[Key, tuple]], disks: Disks, device: torch.device):
        self.own, self.specs, self.disks, self.device = held.tensors() if held else {}, specs, disks, device

    def move(self, wanted: set[Key]) -> dict[Key, torch.Tensor]:
        """Those tensors, on this rank's device; what it held itself is the same tensor. Collective.

        All ranks go through the same list of transfers, in which the receivers take turns, and have a few under way: so
        different links are in use at a time.
        """
        found = {key: self.own[key] for key in wanted if key in self.own}
        needed, under_way = self.disks.gather(sorted(wanted - found.keys())), collections.deque()
        for rank, key in (each for row in zip_longest(*needed) for each in enumerate(row) if each[1]):
            holders = [other for other, spec in enumerate(self.specs) if key in spec]
            source = holders[rank % len(holders)]
            if self.disks.rank == source:
                value = self.own[key].detach().cpu().contiguous()
                under_way.append((dist.isend(as_bytes(value), rank, group=self.disks.group), value))
            elif self.disks.rank == rank:
                dtype, shape = self.specs[source][key]
                found[key] = torch.empty(shape, dtype=dtype)
                under_way.append((dist.irecv(as_bytes(found[key]), source, group=self.disks.group), None))
            if len(under_way) > UNDER_WAY:
                under_way.popleft()[0].wait()
        for handle, _ in under_way:
            handle.wait()
        for key in found.keys() - self.own.keys():
            stays = key[1] == "step" and not torch.cuda.is_initialized()
            found[key] = found[key].to("cpu" if stays else self.device)
        return found

    def weights(self, stage) -> None:
        """As plugin.configure(weights=...) calls it."""
        tp_rank = pgm.process_group_manager.tp_rank
        make_buffers(stage.model, self.device, {name for name, _, _ in self.specs_of_all()})
        self.assign(stage, {name: key_of(stage, name, "", tp_rank) for name in stage.model.state_dict()})

    def load_adapters(self, stage) -> None:
        tp_rank = pgm.process_group_manager.tp_rank
        self.assign(stage, {name: key_of(stage, name, "", tp_rank) for name in stage.model.state_dict()
                            if ".lora_" in name})

    def specs_of_all(self) -> set[Key]:
        return {key for spec in self.specs for key in spec}

    def assign(self, stage, keys: dict[str, Key]) -> None:
        """Gives the stage the tensors with these keys, by their names in its model; those that nobody holds are left.
        """
        known = self.specs_of_all()
        values = self.move({key for key in keys.values() if key in known})
        tensors, made = stage.model.state_dict(keep_vars=True), {}
        for name, key in keys.items():
            if key in values:
                old = tensors[name]  # a parameter that has two names stays one
                if isinstance(old, torch.nn.Parameter) and old not in made:
                    made[old] = torch.nn.Parameter(values[key], old.requires_grad)
                tensors[name] = made.get(old, values[key])
            else:
                del tensors[name]
        tensors = {name: tensors[name] for name in keys if name in tensors}
        stage.model.load_state_dict(tensors, strict=False, assign=True)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, stage) -> None:
        tp_rank = pgm.process_group_manager.tp_rank
        params = {key_of(stage, name, "", tp_rank): param for name, param in stage.model.named_parameters()}
        wanted = {key for key in self.specs_of_all() if key[1] and (key[0], "", key[2]) in params}
        for (name, entry, rank), value in self.move(wanted).items():
            optimizer.state[params[name, "", rank]][entry] = value


class InMemory(NamedTuple):
    """What all ranks hold of one step together: for each rank the dtype and shape of each key, the Commit of the step,
    the state as state.json has it, and the step of the last checkpoint. A rank without keys holds nothing of the run's
    state, whatever it has."""

    specs: list[dict[Key, tuple]]
    commit: Commit | None
    state: dict
    written: int


def find_in_memory(generation, disks: Disks) -> InMemory | None:
    """What the ranks hold since the last `generation`; None where something is held by nobody. Collective.

    It calls generation.forget() on a rank whose state is not that of the run.
    """
    held = generation.held
    everyone = disks.gather(held and (held.generation, held.step, held.commit, held.checkpointer.written))
    last = max((each[0] for each in everyone if each), default=None)
    known = [each for each in everyone if each and each[0] == last]
    if not known:
        return None
    commits = sorted({commit for _, _, commit, _ in known if commit})
    step = max([each for _, each, _, _ in known] + [commit.step for commit in commits])
    written, is_current = min(written for *_, written in known), held is not None and held.generation == last
    if is_current:
        held.agree(commits)
        held.checkpointer.written = written
        is_current = held.step == step
    mine = held.tensors() if is_current else {}
    specs = {key: (value.dtype, value.shape) for key, value in mine.items()}
    everyone = disks.gather((specs, is_current and (held.everything, held.checkpointer.state(step))))
    everything, state = max((facts for _, facts in everyone if facts), key=lambda facts: len(facts[1]["records"]))
    if not everything <= {key for each, _ in everyone for key in each}:
        generation.forget()
        if is_home():
            print("a part of the model was on lost hosts alone: all ranks go back to the last checkpoint", flush=True)
        return None
    if is_current:
        held.generation = generation.number
        for param in held.stage.model.parameters():
            param.grad = None  # all have taken the step that they were for
    else:
        generation.forget()
    commit = next((each for each in commits if each.step == step), None)
    if commit and f'"step": {step}, "loss"' not in state["records"]:  # no rank has come to make its row
        state["records"] += json.dumps({**commit._asdict(), "trained_tokens": state["tokens"]}) + "\n"
    return InMemory([each for each, _ in everyone], commit, state, written)


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
