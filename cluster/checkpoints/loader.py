"""Loading from a checkpoint under any topology. A file that some rank needs and its host lacks is sent to it."""

import functools

import torch

from checkpoints.resume import Found
from models.names import name_function, peft_name, trained_alone
from models.published import get_slice, load_stage
from ranks.disks import Disks
from tensor_parallel import split_parameter
from utils import UserError


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
        everyone = self.disks.gather((self.disks.mine.leader, files))
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
