"""One forward pass through a pipeline of stages."""

import torch

from pipeline_parallel import Action


def forward(stage, communication, number: int, batch: dict[str, torch.Tensor]):
    """What this stage makes of micro-batch `number`; hidden states are sent on to the next stage."""
    action = Action("F", number)
    communication.post_receive(action, stage.hidden_shape(**batch))
    out = stage(communication.receive(action), **batch)
    communication.send(action, out if isinstance(out, torch.Tensor) else None)
    return out
