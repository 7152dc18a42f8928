"""Finding the newest checkpoint that is whole, on all disks together, and loading from it under any topology.

Where hosts share no disk, no one of them may have all files. Each says which it has; a file that some rank needs and
its host lacks is sent to it. What is truncated, or has another checksum than state.json says, counts as missing.
"""

import functools
import os
import socket
from collections.abc import Callable
from typing import NamedTuple

import torch

from checkpoints.disks import Disks
from checkpoints.files import (
    STATE, check_file, read_index, read_latest, read_state, step_of,
)
from checkpoints.pieces import name_function, peft_name, their_name, trained_alone
from machine_facts import is_home
from stage_weights import load_weights, look_into
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
    if wanted != "auto":
        folder, name = locate(wanted, disks)
    is_one = name and folder != wanted
    mine = read_states(folder, [name] if is_one else None) if disks.leads else {}
    of_disks = disks.gather((socket.gethostname(), mine))
    run_id = run_id or only_run(folder, of_disks)
    names = [name] if name else {each for _, states in of_disks for each, state in states.items()
                                 if run_of(state) in (None, run_id)}
    for each in sorted(names, key=step_of, reverse=True):
        found = look_at(folder, each, disks, run_id, [states.get(each) for _, states in of_disks])
        if isinstance(found, Found):
            return found
        if name:
            raise UserError(f"no whole checkpoint: {found}. Name another one, or use --resume auto")
        if is_home():
            print(f"the checkpoint {each} is not whole: {found}. Falling back to the one before", flush=True)
    return None


def read_states(folder: str, names: list[str] | None = None) -> dict[str, dict | str]:
    """The state of each checkpoint in a folder, or of `names`, that is on this disk; if it can't be read, why."""
    if names is None:
        names = [name for name in os.listdir(folder) if step_of(name) >= 0] if os.path.isdir(folder) else []
    states = {}
    for path, name in ((os.path.join(folder, name), name) for name in names):
        if not os.path.isdir(path):
            continue
        try:
            states[name] = read_state(os.path.join(path, STATE))
        except (OSError, UserError) as error:
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


def locate(path: str, disks: Disks) -> tuple[str, str]:
    """The folder and the name of the checkpoint at a path: itself, or where `latest` in it points. Collective."""
    if not (latest := max(disks.gather(read_latest(path)))):
        return os.path.split(os.path.abspath(path))
    if os.path.basename(latest) != latest:
        raise UserError(f"{os.path.join(path, 'latest')} names {latest!r}, which is no folder beside it")
    return path, latest


def look_at(folder: str, name: str, disks: Disks, run_id: str | None, of_disks: list) -> Found | str:
    """The checkpoint of that name, if all disks together have it; else what is wrong with it. Collective.

    `of_disks`: for each rank, if it leads a disk, what read_states has of it. Where a disk has another run's
    checkpoint of that name, or one of other files, it counts as missing there.
    """
    path = os.path.join(folder, name)
    states = {rank: state for rank, state in enumerate(of_disks) if isinstance(state, dict) and run_of(state) == run_id}
    state = next(iter(states.values()), {"files": {}})
    states = {rank: own for rank, own in states.items() if own["files"] == state["files"]}
    mine = states.get(disks.rank, {"files": {}})
    problems = disks.gather({file: check_file(path, file, facts) for file, facts in mine["files"].items()})
    holders = {file: [rank for rank, found in enumerate(problems) if found.get(file, "") is None]
               for file in state["files"]}
    wrong = {STATE: error for error in of_disks if isinstance(error, str)}
    wrong |= {file: problem for found in problems for file, problem in found.items() if problem}
    lacking = [file for file, having in holders.items() if not having] or ([] if states else [STATE])
    if lacking:
        return wrong.get(lacking[0], f"{os.path.join(path, lacking[0])} is on no disk of these hosts")
    if wrong and is_home():
        print(f"warning: {next(iter(wrong.values()))}; another disk has it", flush=True)
    return Found(name, folder, state, holders)


class Loader:
    """Gives a stage its weights, and then an optimizer its state, from a checkpoint. All ranks use it together."""

    def __init__(self, found: Found, disks: Disks, device: torch.device):
        self.found, self.disks, self.device = found, disks, device

    def weights(self, stage) -> None:
        """As plugin.configure(weights=...) calls it."""
        self.bring(stage)
        load_stage(self.found.path, self.found.state["model_map"], stage, self.device)

    def bring(self, stage) -> None:
        """Sends the files that this stage needs to its host, if that lacks them. Collective. Raises UserError."""
        state, name_of, holders = self.found.state, name_function(stage), self.found.holders
        own = {name_of(name) for name in (*stage.model.state_dict(), *(stage.tied or ()))}
        files = {state["parameters"][name] for name in own & state["parameters"].keys()}
        files |= {file for entry, file in state["optimizer_map"].items() if entry.rpartition(".")[0] in own}
        everyone = self.disks.gather((self.disks.mine.leader, files))
        needs = {(file, leader) for leader, needed in everyone for file in needed if leader not in holders[file]}
        copies = [(file, holders[file][0], leader) for file, leader in sorted(needs)]
        self.disks.copy(self.found.path, copies, "a file of the checkpoint could not be copied to a host that lacks "
                                                 "it: {}")

    def load_adapters(self, stage) -> None:
        """Gives the adapters that a stage has their values. Collective."""
        self.bring(stage)
        for name in trained_alone(stage) or ():
            param = stage.model.get_parameter(name)
            module, _, key = name.rpartition(".")
            piece = get_slice(self.found.path, self.found.state["model_map"], peft_name(name))
            value = split_parameter(stage.model.get_submodule(module), key, piece)
            if value.shape != param.shape:
                raise UserError(f"{peft_name(name)} has the shape {tuple(value.shape)} in {self.found.path}, but "
                                f"{tuple(param.shape)} here: give --lora_rank and --model_name as they were")
            param.data.copy_(value)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, stage) -> None:
        """The state of each parameter, in slices as this rank holds it. Learning rates follow from the flags."""
        weight_map, name_of, entries = self.found.state["optimizer_map"], name_function(stage), {}
        for entry in weight_map:
            entries.setdefault(entry.rpartition(".")[0], []).append(entry)
        for name, param in stage.model.named_parameters():
            module, _, key = name.rpartition(".")
            names = (name, *(stage.tied if stage.tied and name in stage.tied else ()))
            known = next((entries[name_of(other)] for other in names if name_of(other) in entries), [])
            for entry in known:
                piece = get_slice(self.found.path, weight_map, entry)
                is_split = len(piece.get_shape()) == param.dim() > 0
                value = split_parameter(stage.model.get_submodule(module), key, piece) if is_split else piece[...]
                if (is_split or not entry.endswith(".step")) and value.shape != param.shape:
                    raise UserError(f"{entry} has the shape {tuple(value.shape)} in {self.found.path}, but {name} of "
                                    f"the model {tuple(param.shape)}: is this a checkpoint of this model?")
                place = param.device if is_split or param.is_cuda else "cpu"
                dtype = param.dtype if is_split else value.dtype  # the run before may have had another --dtype
                optimizer.state[param][entry.rpartition(".")[2]] = value.to(place, dtype, copy=True)


def published_weights(directory: str) -> Callable:
    """weights(stage, device), from a directory of Hugging Face's that is no checkpoint of ours: --init_from."""
    index, single = (os.path.join(directory, f"model.safetensors{end}") for end in (".index.json", ""))
    if os.path.isfile(index):
        weight_map = read_index(index)
    elif os.path.isfile(single):
        weight_map = look_into(single, lambda file: dict.fromkeys(file.keys(), os.path.basename(single)))
    else:
        raise UserError(f"{directory} has neither model.safetensors nor model.safetensors.index.json: name a directory "
                        "that save_pretrained wrote, a checkpoint, or one from the Hub")
    return functools.partial(load_stage, directory, weight_map)


def load_stage(folder: str, weight_map: dict[str, str], stage, device: torch.device) -> None:
    """Gives a stage its weights, from the safetensors files in a folder. Raises UserError."""
    source = {name: functools.partial(get_slice, folder, weight_map, name) for name in weight_map}
    if name_function(stage) is their_name:
        ours = {*stage.model.state_dict(), *dict(stage.model.named_parameters(remove_duplicate=False)),
                *(stage.tied or ())}
        source = {name: source[their_name(name)] for name in ours if their_name(name) in source}
    try:
        load_weights(stage, source, device)
    except UserError as error:
        raise UserError(f"the weights in {folder}: {error}") from None


def get_slice(folder: str, weight_map: dict[str, str], name: str):
    """A tensor of the safetensors files in a folder, which reads when it is indexed. Raises UserError.

    What stays open stays mapped into memory, and each page that was read counts as the process's: keep it for a moment.
    """
    return look_into(os.path.join(folder, weight_map[name]), lambda file: file.get_slice(name))
