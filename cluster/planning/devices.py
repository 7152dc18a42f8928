"""Clusters by name: `64xH100:8`, `3xRaspberryPi5:1@100mbit`, `1xRTX5070Ti:1+1xRTX4070:1+1xRTX3070Ti:1@1gbit`.

    N x DEVICE [: devices per node] [+ more of them] [@ what a node's network carries, in each direction]

The numbers of a device are the peaks of its data sheet, dense (without sparsity); nobody reaches them.
"""

import re
from typing import NamedTuple

from utils import UserError

GB, GBIT = 1e9, 1e9 / 8
ETHERNET, INFINIBAND = 2e-4, 1e-5  # seconds from process to process: over TCP at home, over RDMA in a data centre


class Device(NamedTuple):
    bfloat16: float | None  # FLOP/s of matrix products that accumulate in float32; None: it has no unit for them
    float32: float  # FLOP/s, without TF32, as torch does it by default
    memory: float  # bytes
    memory_bandwidth: float  # bytes/s
    node_link: float  # bytes/s to another device of the node, in one direction
    port: float  # bytes/s of the network, in one direction; a device's own in a data centre, else the node's
    latency: float  # seconds, over that network


# NVIDIA's data sheets of H100, H200, A100 (SXM) and L40S; NVLink there is the sum of both directions. Ports: the one
# ConnectX of each GPU in DGX H100, H200 and A100. GeForce: the architecture white papers; PCIe 4.0 or 5.0 x16.
# Raspberry Pi 5: 4 Cortex-A76 at 2.4 GHz, two 128-bit multiply-adds a cycle, 32-bit LPDDR4X-4267, the 8 GB model.
DEVICES = {
    "H100": Device(989e12, 67e12, 80 * GB, 3350 * GB, 450 * GB, 400 * GBIT, INFINIBAND),
    "H200": Device(989e12, 67e12, 141 * GB, 4800 * GB, 450 * GB, 400 * GBIT, INFINIBAND),
    "A100": Device(312e12, 19.5e12, 80 * GB, 2039 * GB, 300 * GB, 200 * GBIT, INFINIBAND),
    "L40S": Device(362e12, 91.6e12, 48 * GB, 864 * GB, 32 * GB, 200 * GBIT, INFINIBAND),
    "RTX4090": Device(165e12, 82.6e12, 24 * GB, 1008 * GB, 32 * GB, 1 * GBIT, ETHERNET),
    "RTX3090": Device(71e12, 35.6e12, 24 * GB, 936 * GB, 32 * GB, 1 * GBIT, ETHERNET),
    "RTX5070Ti": Device(88e12, 43.9e12, 16 * GB, 896 * GB, 64 * GB, 1 * GBIT, ETHERNET),
    "RTX4070": Device(58e12, 29.1e12, 12 * GB, 504 * GB, 32 * GB, 1 * GBIT, ETHERNET),
    "RTX3070Ti": Device(43.5e12, 21.7e12, 8 * GB, 608 * GB, 32 * GB, 1 * GBIT, ETHERNET),
    "RaspberryPi5": Device(None, 0.154e12, 8 * GB, 17 * GB, 17 * GB, 1 * GBIT, ETHERNET),
}
GROUP = re.compile(r"(\d+)x([A-Za-z]\w*)(?::(\d+))?")
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(bit|b)", re.IGNORECASE)


class Node(NamedTuple):
    """A machine with `count` devices of one kind. `network`: bytes/s of the whole node, in one direction."""

    name: str
    device: Device
    count: int
    network: float


def parse_rate(flag: str, text: str) -> float:
    """'100mbit' -> 12.5e6 bytes/s; '450GB' -> 450e9."""
    if not (match := RATE.fullmatch(text)) or not float(match[1]):
        raise UserError(f"{flag} {text!r}: write a rate as in 100mbit, 1gbit or 450GB, each of a second")
    return float(match[1]) * 1000 ** " kmgt".index(match[2].lower() or " ") / (8 if match[3].lower() == "bit" else 1)


def parse_nodes(spec: str) -> list[Node]:
    """What --cluster says, node by node. Raises UserError where it can't be read, or names an unknown device."""
    groups, _, rate = spec.partition("@")
    by_name, nodes = {name.lower(): name for name in DEVICES}, []
    for group in groups.split("+"):
        match = GROUP.fullmatch(group.strip())
        if not match or not int(match[1]) or not int(match[3] or 1):
            raise UserError(f"--cluster {spec!r}: write the number, the device and how many a node has, as in "
                            "64xH100:8 or 3xRaspberryPi5:1@100mbit, with + between unlike ones")
        if match[2].lower() not in by_name:
            raise UserError(f"--cluster {spec!r}: no {match[2]!r} among {', '.join(DEVICES)}: choose the one that is "
                            "most like it, and give --peak_tflops, --device_memory and the like")
        name, number = by_name[match[2].lower()], int(match[1])
        device, per_node = DEVICES[name], min(number, int(match[3] or 1))
        if number % per_node:
            raise UserError(f"--cluster {spec!r}: nodes have equally many devices and none may be left over, but "
                            f"this is {number} in nodes of {per_node}")
        ports = per_node if device.latency == INFINIBAND else 1
        network = parse_rate("--cluster ...@", rate) if rate else device.port * ports
        nodes += [Node(name, device, per_node, network)] * (number // per_node)
    return nodes
