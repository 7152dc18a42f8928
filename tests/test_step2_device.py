"""The device and the backend of each rank, on machines with GPUs that are not here."""

import pytest
import torch
from lab.launch import modules_of
from lab.program import Program

utils = Program(2).load().utils


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
    stand_ins = {"is_available": lambda: True, "device_count": lambda: gpus, "set_device": chosen.append,
                 "is_bf16_supported": lambda including_emulation: True}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    device, dtype, backend = utils.choose_device("auto", "auto")
    assert ((str(device), backend), dtype, chosen) == (expected, torch.bfloat16, [device.index])


@pytest.mark.parametrize("step", [1, 2, 9, 16])
def test_gpus_without_bfloat16_in_hardware_compute_in_float32(monkeypatch, capsys, step):
    """torch says that they support it, by emulation, which is many times slower. Rank 0 says what is chosen. `native`:
    the GPUs that have it. That of this rank counts, which need not be the first one of the machine."""
    with modules_of(step):
        import utils
    said = []
    stand_ins = {"is_available": lambda: True, "device_count": lambda: 2, "get_device_name": lambda *_: "Tesla T4",
                 "set_device": lambda number: current.append(number),
                 "is_bf16_supported": lambda including_emulation=True: including_emulation or current[-1] in native}
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for rank, native, dtype, expected in ((0, {1}, "auto", "float32"), (1, {1}, "auto", "bfloat16"),
                                          (1, {0}, "auto", "float32"), (0, {}, "bfloat16", "bfloat16"),
                                          (0, {0}, "auto", "bfloat16"))[: None if step > 1 else 1]:
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", 2), ("LOCAL_WORLD_SIZE", 2)):
            monkeypatch.setenv(name, str(value))
        current = [0]
        assert str(utils.choose_device("auto", dtype)[1]) == f"torch.{expected}", (rank, native)
        said.append(capsys.readouterr().out)
    line = "Tesla T4 has no bfloat16 in hardware: --dtype auto is float32\n"
    assert said == [line] + [""] * (len(said) - 1)
    assert utils.choose_device("cpu", "auto")[1] == torch.float32
