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
from safetensors import SafetensorError, safe_open

from checkpoints.disks import Disks
from checkpoints.files import STATE, SURVIVORS, check_file, merge, read_index, read_state, step_of
from checkpoints.pieces import name_function, peft_name, their_name, trained_alone
from stage_weights import load_weights
from tensor_parallel import split_parameter
from machine_facts import is_home
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

    `run_id`: only checkpoints of this run count, whatever else is on a disk. Collective. Raises UserError, on every
    rank, where a path has no whole checkpoint, and where disks have those of unlike runs and run_id is None.
    """
    name = None
    if wanted != "auto":
        folder, name = locate(wanted, disks)
    is_one = name is not None and folder != wanted
    of_disks = disks.gather((socket.gethostname(), run_ids(folder, [name] if is_one else None) if disks.leads else {}))
    run_id = run_id or only_run(folder, of_disks)
    if name is not None:
        return choose(folder, [name], disks, run_id, is_certain=True)
    names = {name for _, ids in of_disks for name in ids if ids[name] in (None, run_id)}
    newest_first = sorted(names, key=lambda name: (step_of(name), not name.endswith(SURVIVORS)), reverse=True)
    return choose(folder, newest_first, disks, run_id, is_certain=False)


def run_ids(folder: str, names: list[str] | None = None) -> dict[str, str | None]:
    """The run of each checkpoint in a folder, or of `names`; None for one whose state can't be read."""
    if names is None:
        names = [name for name in os.listdir(folder) if step_of(name) >= 0] if os.path.isdir(folder) else []
    states = {name: read_states(os.path.join(folder, name)) for name in names}
    return {name: run_of(state) if state else None for name, (state, _) in states.items()}


def run_of(state: dict) -> str:
    return str(state.get("run_id"))


def only_run(folder: str, of_disks: list[tuple[str, dict]]) -> str | None:
    """The run of the newest checkpoint on each disk, of (host, run_ids). Raises UserError where it is not the same."""
    newest = {}
    for host, ids in of_disks:
        if known := [name for name in ids if ids[name]]:
            name = max(known, key=step_of)
            newest.setdefault(ids[name], f"{name} on {host}")
    if len(newest) > 1:
        listed = ", and of another run ".join(newest.values())
        raise UserError(f"{folder} has checkpoints of unlike runs: {listed}: rename the folder of the run that is not "
                        "to go on, on its host")
    return next(iter(newest), None)


def locate(path: str, disks: Disks) -> tuple[str, str]:
    """The folder and the name of the checkpoint at a path: itself, or where `latest` in it points. Collective."""
    name = None
    if disks.leads:
        try:
            with open(os.path.join(path, "latest"), encoding="utf-8") as file:
                name = file.read().strip()
        except (OSError, UnicodeDecodeError):
            pass
    latest = max((name for name in disks.gather(name) if name), default=None)
    if latest is None:
        path = os.path.abspath(path)
        return os.path.dirname(path), os.path.basename(path)
    if os.path.basename(latest) != latest:
        raise UserError(f"{os.path.join(path, 'latest')} names {latest!r}, which is no folder beside it")
    return path, latest


def choose(folder: str, names: list[str], disks: Disks, run_id: str | None, is_certain: bool) -> Found | None:
    """The first of `names` that is whole. home_rank() prints why others are not; `is_certain`: it is an error instead.

    Where a disk has another run's checkpoint of that name, or one of other files, it counts as missing there.
    """
    for name in names:
        seen = disks.gather((disks.rank, *look(os.path.join(folder, name))) if disks.leads else None)
        seen = [each for each in seen if each and (each[1] is None or run_of(each[1]) == run_id)]
        states = [state for _, state, _ in seen if state]
        if not name.endswith(SURVIVORS):
            seen = [each for each in seen if each[1] is None or each[1]["files"] == states[0]["files"]]
        problems = {file: problem for *_, found in seen for file, problem in found.items() if problem}
        state = unite(states)
        holders = {file: [leader for leader, _, found in seen if found.get(file, "") is None]
                   for file in state["files"]}
        lacking = [file for file, having in holders.items() if not having] or ([] if states else [STATE])
        lacking += {*state.get("names", ())} - state["parameters"].keys()  # of survivors: what only lost ranks held
        if not lacking:
            if problems and is_home():
                print(f"warning: {next(iter(problems.values()))}; another disk has it", flush=True)
            return Found(name, folder, state, holders)
        what = problems.get(lacking[0], f"{os.path.join(folder, name, lacking[0])} is on no disk of these hosts")
        if is_certain:
            raise UserError(f"no whole checkpoint: {what}. Name another one, or use --resume auto")
        if is_home() and not name.endswith(SURVIVORS):
            print(f"the checkpoint {name} is not whole: {what}. Falling back to the one before", flush=True)
    return None


def look(path: str) -> tuple[dict | None, dict[str, str | None]]:
    """What this disk has of a checkpoint: the state, and for each file what is wrong with it, None for nothing."""
    state, error = read_states(path)
    if state is None:
        return None, {STATE: error} if error else {}
    return state, {name: check_file(path, name, facts) for name, facts in state["files"].items()}


def read_states(path: str) -> tuple[dict | None, str | None]:
    """The state of a checkpoint, or of what survivors wrote on this disk, or why it can't be read."""
    if not os.path.isdir(path):
        return None, None
    try:
        if path.endswith(SURVIVORS):
            parts = [read_state(os.path.join(path, name)) for name in sorted(os.listdir(path)) if name[:5] == "part-"]
            return (unite(parts) if parts else None), None
        return read_state(os.path.join(path, STATE)), None
    except (OSError, UserError) as error:
        return None, str(error)


def unite(states: list[dict]) -> dict:
    """The states of all disks as one: those of survivors tell of their own files only."""
    return {**(states[0] if states else {}), **merge(states)}


def bring(found: Found, needed: set[str], disks: Disks) -> None:
    """Sends the files that ranks need to the disks that lack them. Collective. Raises UserError."""
    needs = {(file, leader) for leader, files in disks.gather((disks.mine.leader, needed)) for file in files}
    copies = [(file, found.holders[file][0], leader) for file, leader in sorted(needs)
              if leader not in found.holders[file]]
    disks.copy(found.path, copies, "a file of the checkpoint could not be copied to a host that lacks it: {}")


class Loader:
    """Gives a stage its weights, and then an optimizer its state, from a checkpoint. All ranks use it together."""

    def __init__(self, found: Found, disks: Disks, device: torch.device):
        self.found, self.disks, self.device = found, disks, device

    def weights(self, stage) -> None:
        """As plugin.configure(weights=...) calls it."""
        self.bring(stage)
        load_stage(self.found.path, self.found.state["model_map"], stage, self.device)

    def bring(self, stage) -> None:
        """The files that this stage needs, to its host. Collective."""
        maps, name_of = self.found.state, name_function(stage)
        own = {name_of(name) for name in (*stage.model.state_dict(), *(stage.tied or ()))}
        files = {maps["parameters"][name] for name in own if name in maps["parameters"]}
        files |= {file for entry, file in maps["optimizer_map"].items() if entry.rpartition(".")[0] in own}
        bring(self.found, files, self.disks)

    def load_adapters(self, stage) -> None:
        """Gives the adapters that a stage has their values. Collective."""
        self.bring(stage)
        for name, param in stage.model.named_parameters():
            if name in (trained_alone(stage) or ()):
                value = get_slice(self.found.path, self.found.state["model_map"], peft_name(name))[...]
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
                if is_split and value.shape != param.shape:
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
        weight_map = dict.fromkeys(open_tensors(single).keys(), os.path.basename(single))
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


def open_tensors(path: str):
    """A safetensors file. Raises UserError where it is none.

    What stays open stays mapped into memory, and each page that was read counts as the process's: keep it for a moment.
    """
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} is no safetensors file ({error}): take one that save_pretrained, or this script, "
                        "wrote") from None


def get_slice(folder: str, weight_map: dict[str, str], name: str):
    """A tensor of the safetensors files in a folder, which reads when it is indexed. Raises UserError."""
    path = os.path.join(folder, weight_map[name])
    try:
        return open_tensors(path).get_slice(name)
    except SafetensorError as error:
        raise UserError(f"{path} has no tensor {name} ({error}): take the index and the files from one place") from None
