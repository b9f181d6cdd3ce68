"""The chips that plans are made for, their devices, and a mesh that fits them."""

import math
import re
from dataclasses import dataclass

import jax
from jax.experimental import topologies

from wanjax.run import metrics

GIB = 2**30
HELD = 0.6  # share of a device that weights and moments may take in a proposed mesh


@dataclass(frozen=True)
class Chip:
    """One device as XLA sees it: memory in bytes, dense bf16 FLOP/s, link bytes/s."""

    hbm: float
    peak: float
    link: float  # ICI or NVLink, all links of one device, one direction
    kernel: str


# cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; a tpu7x chip is two devices, halved here.
# nvidia.com data sheets of H100 SXM and H200: dense bf16, NVLink 900 GB/s both ways.
CHIPS = {
    "v5e": Chip(16 * GIB, metrics.PEAKS["TPU v5e"], 200e9, "splash"),
    "v5p": Chip(95 * GIB, metrics.PEAKS["TPU v5p"], 600e9, "splash"),
    "v6e": Chip(32 * GIB, metrics.PEAKS["TPU v6"], 448e9, "splash"),
    "tpu7x": Chip(96 * GIB, metrics.PEAKS["TPU7x"], 600e9, "splash"),
    "h100": Chip(80e9, metrics.PEAKS["H100"], 450e9, "cudnn"),
    "h200": Chip(141e9, metrics.PEAKS["H200"], 450e9, "cudnn"),
    "cpu": Chip(math.inf, math.inf, math.inf, "xla"),
}


def devices_of(topology: str) -> tuple[str, list]:
    """(chip name, devices) of a topology name; raises ValueError with the names that exist."""
    name, _, size = topology.partition(":")
    if name not in CHIPS or not re.fullmatch(r"\d+(x\d+)*", size):
        raise ValueError(
            f"topology {topology!r} is unknown; expected CHIP:SIZE such as v5p:4x4x4, v6e:16x16, "
            f"v5e:8x8, tpu7x:4x4x4, h100:8, h200:8 or cpu:8 (chips {', '.join(CHIPS)})"
        )
    if CHIPS[name].kernel == "splash":
        try:
            return name, list(topologies.get_topology_desc(topology, platform="tpu").devices)
        except Exception as error:
            raise ValueError(
                f"topology {topology!r}: {str(error).splitlines()[0]}; check the shape, and install"
                " wanjax[plan] for libtpu"
            ) from None
    if CHIPS[name].kernel == "cudnn" and name in jax.devices()[0].device_kind.lower():
        if int(size) <= len(jax.devices()):
            return name, jax.devices()[: int(size)]
        found = topologies.get_topology_desc("", platform="cuda", topology=f"1x1x{size}")
        return name, list(found.devices)
    present = jax.devices("cpu")
    if len(present) < int(size):
        raise ValueError(
            f"topology {topology!r} needs {size} CPU devices, found {len(present)}; set "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={size}"
        )
    return name, present[: int(size)]


def propose_mesh(number: int, batch: int, heads: int, held: int, hbm: float) -> dict[str, int]:
    """A mesh of `number` devices: as many batch shards as divide, context over the rest, and that
    only by a divisor of the heads where one is possible. Context splits what must be `held`
    (bytes) as well, the shards only until it takes the share HELD of a device: what is whole on
    each of them is never gathered between them."""
    options = []
    for shards in range(1, number + 1):
        if number % shards == 0 and batch % shards == 0:
            context = number // shards
            options.append((heads % context == 0, shards, context))
    _, shards, context = max(options)
    splits = [n for n in range(1, shards + 1) if shards % n == 0]
    fsdp = next((n for n in splits if held / n / context <= hbm * HELD), shards)
    return {"data": shards // fsdp, "fsdp": fsdp, "context": context, "tensor": 1, "stage": 1}
