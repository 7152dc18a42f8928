"""The device and the backend of each rank, on machines with GPUs that are not here."""

import pytest
import torch

from launch import modules_of

with modules_of(2):
    import utils


@pytest.mark.parametrize("variables, gpus, expected", [
    ({}, 1, ("cuda:0", "nccl")),
    ({"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, 2, ("cuda:1", "nccl")),
    ({"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, 2, ("cuda:1", "nccl")),
    ({"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}, 1, ("cuda:0", "gloo")),
    ({"RANK": 1, "WORLD_SIZE": 2}, 1, ("cuda:0", "gloo")),  # a launcher that counts no machine's ranks
    ({"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1}, 1, ("cuda:0", "gloo")),
    ({"RANK": 1, "WORLD_SIZE": 2}, 2, ("cuda:1", "nccl")),
], ids=str)
def test_ranks_that_share_a_gpu_communicate_over_gloo(monkeypatch, variables, gpus, expected):
    """NCCL refuses two ranks on one GPU."""
    for name in "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE":
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    chosen = []
    stand_ins = {"is_available": lambda: True, "device_count": lambda: gpus, "set_device": chosen.append}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device, dtype, backend = utils.choose_device("auto", "auto")
    assert ((str(device), backend), dtype, chosen) == (expected, torch.bfloat16, [device.index])
