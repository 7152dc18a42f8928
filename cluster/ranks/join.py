"""The ranks meet: each chooses its device, joins the others, and rank 0 prints who is there."""

import os
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

import process_group_manager as pgm
from hosts.host_facts import interface_towards, print_rows, processor
from ranks.collectives import gather, say
from utils import UserError, choose_device

OF_A_HOST = {"backend", "plan", "init_from", "resume"}  # flags of which a host may have its own value


def meet(args, join: Callable[..., None] = pgm.init_process_group) -> tuple[torch.device, torch.dtype]:
    """Meets the other ranks, by `join` of a backend. Returns the device that this one computes on, and its dtype.
    Collective. Raises UserError where ranks choose unlike backends, or were given unlike flags."""
    device, dtype, backend = choose_device(args.device, args.dtype)
    flags = {name: value for name, value in vars(args).items() if name not in OF_A_HOST}
    try:
        join(backend if args.backend == "auto" else args.backend, flags=flags)
    except UserError as error:
        hint = ", or all --backend gloo, and the same --dtype" if "backend of" in str(error) else ""
        raise UserError(f"{error}{hint}") from None
    return device, dtype


def print_table(heads: list[str], rows: list[list]) -> None:
    """Columns as wide as their longest cell; rank 0 prints."""
    if dist.get_rank() == 0:
        print_rows([[str(cell) for cell in row] for row in (heads, *rows)])


def require_one_dtype(dtype: torch.dtype) -> None:
    """Raises UserError where ranks compute in unlike dtypes, as GPUs with and without bfloat16 do. Collective."""
    dtypes = gather(str(dtype).removeprefix("torch."))
    if len(set(dtypes)) > 1:
        raise UserError(f"all ranks have to compute in one dtype, but these differ, by rank: {', '.join(dtypes)}: "
                        "give all the same --dtype, for instance --dtype float32")


def print_banner(device: torch.device, dtype: torch.dtype) -> None:
    """A line a rank: which machine it runs on. Collective. Raises UserError as require_one_dtype does."""
    require_one_dtype(dtype)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    everyone = gather((device.type, os.environ.get("LOCAL_RANK", "0"), socket.gethostname(), name, network_name()))
    kinds = [facts[0] for facts in everyone]
    ranks = "1 rank" if len(everyone) == 1 else f"{len(everyone)} ranks"
    say(f"{ranks} over {dist.get_backend()}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}")
    print_table(["rank", "local rank", "host", "device" if len(set(kinds)) > 1 else device.type.upper(), "network"],
                [[rank, *facts] for rank, (_, *facts) in enumerate(everyone)])


def network_name() -> str:
    """The interface that reaches rank 0's machine, and this machine's address there."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        name, address = interface_towards(master)
    except OSError as error:
        return f"no way to {master}: {error}"
    chosen = os.environ.get("NCCL_SOCKET_IFNAME" if dist.get_backend() == "nccl" else "GLOO_SOCKET_IFNAME")
    return f"{(chosen or name).removeprefix('=')} {address}"
