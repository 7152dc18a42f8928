"""Finding the newest checkpoint that is whole, on all disks together, and loading from it under any topology.

Where hosts share no disk, no one of them may have all files. Each says which it has; a file that some rank needs and
its host lacks is sent to it. What is truncated, or has another checksum than state.json says, counts as missing.
"""


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
            shard = get_slice(self.found.path, self.found.state["model_map"], peft_name(name))
            value = split_parameter(stage.model.get_submodule(module), key, shard)
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
                shard = get_slice(self.found.path, weight_map, entry)
                is_split = len(shard.get_shape()) == param.dim() > 0
                value = split_parameter(stage.model.get_submodule(module), key, shard) if is_split else shard[...]
                if (is_split or not entry.endswith(".step")) and value.shape != param.shape:
                    raise UserError(f"{entry} has the shape {tuple(value.shape)} in {self.found.path}, but {name} of "
                                    f"the model {tuple(param.shape)}: is this a checkpoint of this model?")
                place = param.device if is_split or param.is_cuda else "cpu"
                dtype = param.dtype if is_split else value.dtype  # the run before may have had another --dtype
                optimizer.state[param][entry.rpartition(".")[2]] = value.to(place, dtype, copy=True)
