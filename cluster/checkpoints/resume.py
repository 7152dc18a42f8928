"""Finding the newest checkpoint that is whole, on all disks together, and loading from it under any topology.

Where hosts share no disk, no one of them may have all files. Each says which it has. What is truncated, or has another
checksum than state.json says, counts as missing. A file that some rank needs and its host lacks is sent to it.
"""

import functools
import os
import socket
from typing import NamedTuple

import torch

from checkpoints.files import STATE, check_file, read_latest, read_state, step_of
from models.names import name_function, peft_name, trained_alone
from models.published import load_stage
from ranks.collectives import say
from ranks.disks import Disks
from ranks.placement import home_rank
from stage_weights import get_slice
from tensor_parallel import split_parameter
from utils import UserError


class Found(NamedTuple):
    """A checkpoint to go on from. `holders`: for each file, the leaders of the disks that have it."""

    name: str
    folder: str  # on each host
    state: dict
    holders: dict[str, list[int]]

    @property
    def path(self) -> str:
        return os.path.join(self.folder, self.name)


def find_checkpoint(wanted: str, folder: str, disks: Disks, run_id: str | None = None) -> Found | None:
    """The checkpoint of --resume: "auto" is the newest whole one in the run's own `folder`, or None; else a path.

    `run_id`: only checkpoints of this run count, whatever else is on a disk. home_rank() prints why others do not.
    Collective. Raises UserError, on every rank, where a path has no whole checkpoint, and where disks have those of
    unlike runs and run_id is None.
    """
    name = None
    if wanted != "auto":  # a checkpoint, or a run's folder, whose `latest` names one
        latest = max(disks.gather(read_latest(wanted)))
        if os.path.basename(latest) != latest:
            raise UserError(f"{os.path.join(wanted, 'latest')} names {latest!r}, which is no folder beside it")
        folder, name = (wanted, latest) if latest else os.path.split(os.path.abspath(wanted))
    is_one = name and folder != wanted
    mine = read_states(folder, [name] if is_one else None) if disks.leads else {}
    known = {each: {**state, "records": None} if isinstance(state, dict) else state for each, state in mine.items()}
    of_disks = disks.gather((socket.gethostname(), known))  # rows, of which there may be many, are sent once
    run_id = run_id or only_run(folder, of_disks)
    names = [name] if name else {each for _, states in of_disks for each, state in states.items()
                                 if run_of(state) in (None, run_id)}
    for each in sorted(names, key=step_of, reverse=True):
        found = look_at(folder, each, disks, run_id, [states.get(each) for _, states in of_disks])
        if isinstance(found, Found):
            source = next(rank for rank, (_, states) in enumerate(of_disks) if states.get(each) == found.state)
            rows = disks.share(mine[each].get("records", "") if disks.rank == source else None, source)
            return found._replace(state={**found.state, "records": rows})
        if name:
            raise UserError(f"no whole checkpoint: {found}. Name another one, or use --resume auto")
        say(f"the checkpoint {each} is not whole: {found}. Falling back to the one before", home_rank())
    return None


def read_states(folder: str, names: list[str] | None = None) -> dict[str, dict | str]:
    """The state of each checkpoint in a folder, or of `names`, that is on this disk; if it can't be read, why."""
    if names is None:
        names = [name for name in os.listdir(folder) if step_of(name) >= 0] if os.path.isdir(folder) else []
    states = {}
    for name in names:
        if os.path.isdir(path := os.path.join(folder, name)):
            try:
                states[name] = read_state(os.path.join(path, STATE))
            except UserError as error:
                states[name] = str(error)
    return states


def run_of(state: dict | str) -> str | None:
    """The run that has saved a checkpoint, by what read_states has of it; None where that can't be read."""
    return str(state.get("run_id")) if isinstance(state, dict) else None


def only_run(folder: str, of_disks: list[tuple[str, dict]]) -> str | None:
    """The run of the newest checkpoint on each disk, of (host, states). Raises UserError where it is not the same."""
    newest = {}
    for host, states in of_disks:
        if known := [name for name in states if run_of(states[name])]:
            name = max(known, key=step_of)
            newest.setdefault(run_of(states[name]), f"{name} on {host}")
    if len(newest) > 1:
        listed = ", and of another run ".join(newest.values())
        raise UserError(f"{folder} has checkpoints of unlike runs: {listed}: rename the folder of the run that is not "
                        "to go on, on its host")
    return next(iter(newest), None)


def look_at(folder: str, name: str, disks: Disks, run_id: str | None, of_disks: list) -> Found | str:
    """The checkpoint of that name, if all disks together have it; else what is wrong with it. Collective.

    `of_disks`: for each rank, if it leads a disk, what read_states has of it. Where a disk has another run's
    checkpoint of that name, it counts as missing there. Where disks have unlike files under that name, as where one was
    damaged, the first ones that are whole count.
    """
    path = os.path.join(folder, name)
    states = {rank: state for rank, state in enumerate(of_disks) if isinstance(state, dict) and run_of(state) == run_id}
    mine = states.get(disks.rank, {"files": {}})
    problems = disks.gather({file: check_file(path, file, facts) for file, facts in mine["files"].items()})
    wrong = {STATE: error for error in of_disks if isinstance(error, str)}
    wrong |= {file: problem for found in problems for file, problem in found.items() if problem}
    lacking = [STATE]
    for state in states.values():
        holders = {file: [rank for rank, own in states.items() if own["files"] == state["files"]
                          and problems[rank][file] is None] for file in state["files"]}
        if not (lacking := [file for file, having in holders.items() if not having]):
            if wrong:
                say(f"warning: {next(iter(wrong.values()))}; another disk has it", home_rank())
            return Found(name, folder, state, holders)
    return wrong.get(lacking[0], f"{os.path.join(path, lacking[0])} is on no disk of these hosts")


class Loader:
    """Gives a stage its weights, and then an optimizer its state, from a checkpoint. All ranks use it together."""

    def __init__(self, found: Found, disks: Disks, device: torch.device):
        self.found, self.disks, self.device = found, disks, device

    def weights(self, stage) -> None:
        """As plugin.configure(weights=...) calls it."""
        self.bring(stage)
        weight_map = self.found.state["model_map"]
        source = {name: functools.partial(get_slice, self.found.path, weight_map, name) for name in weight_map}
        load_stage(self.found.path, source, stage, self.device)

    def bring(self, stage) -> None:
        """Sends the files that this stage needs to its host, if that lacks them. Collective. Raises UserError."""
        state, name_of, holders = self.found.state, name_function(stage), self.found.holders
        own = {name_of(name) for name in (*stage.model.state_dict(), *(stage.tied or ()))}
        files = {state["parameters"][name] for name in own & state["parameters"].keys()}
        files |= {file for entry, file in state["optimizer_map"].items() if entry.rpartition(".")[0] in own}
        everyone = self.disks.gather((self.disks.mine[0], files))
        needs = {(file, leader) for leader, needed in everyone for file in needed if leader not in holders[file]}
        copies = [(file, holders[file][0], leader) for file, leader in sorted(needs)]
        self.disks.copy(self.found.path, copies, "a file of the checkpoint could not be copied to a host that lacks "
                                                 "it: {}")

    def load_adapters(self, stage) -> None:
        """Gives the adapters that a stage has their values. Collective."""
        self.bring(stage)
        for name in trained_alone(stage) or ():
            stage.model.get_parameter(name).data.copy_(self.part(stage, name, "model", peft_name(name)))

    def load_optimizer(self, optimizer: torch.optim.Optimizer, stage) -> None:
        """The state of each parameter, in slices as this rank holds it. Learning rates follow from the flags."""
        name_of, entries = name_function(stage), {}
        for entry in self.found.state["optimizer_map"]:
            entries.setdefault(entry.rpartition(".")[0], []).append(entry)
        for name, param in stage.model.named_parameters():
            names = (name, *(stage.tied if stage.tied and name in stage.tied else ()))
            for entry in next((entries[name_of(other)] for other in names if name_of(other) in entries), []):
                optimizer.state[param][entry.rpartition(".")[2]] = self.part(stage, name, "optimizer", entry)

    def part(self, stage, name: str, kind: str, entry: str) -> torch.Tensor:
        """What this rank holds of a tensor of the checkpoint: its part, as of parameter `name`, or a step count.

        Raises UserError for a tensor of another shape. The run before may have had another --dtype.
        """
        (module, _, key), param = name.rpartition("."), stage.model.get_parameter(name)
        whole = get_slice(self.found.path, self.found.state[f"{kind}_map"], entry)
        if entry.endswith(".step"):
            return whole[...].to(param.device, copy=True)
        value = split_parameter(stage.model.get_submodule(module), key, whole)
        if value.shape != param.shape:
            raise UserError(f"{entry} has the shape {tuple(value.shape)} in {self.found.path}, but {name} of the model "
                            f"{tuple(param.shape)}: give --model_name and --lora_rank as they were")
        return value.to(param.device, param.dtype, copy=True)
