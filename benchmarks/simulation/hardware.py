"""Machines: their tiers and how fast they compute. Figures of the presets are assumed, not measured."""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["ASSUMED", "ASSUMED_FOUR", "Hardware", "Link"]

GB = 10**9


@dataclass(frozen=True, slots=True)
class Link:
    """How bytes come from somewhere.

    Parameters
    ----------
    bytes_per_s : float
        Of all reads together.
    latency_s : float
        Of each read, beside others.
    """

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Hardware:
    """A machine with a device of its own memory.

    Parameters
    ----------
    name : str
    flops_per_s, memory_bytes_per_s : float
        What a forward reaches, not what is printed on the device.
    step_s : float
        What a pass takes besides.
    device_bytes : int
        For KV, beside the weights.
    host_bytes, disk_bytes : int
        Of the memory tier, and of the store's folder.
    host, disk, remote : Link
        From the host's memory to the device, from the disk to the host, and from other machines to the host. Without
        `remote`, what leaves the disk is gone.
    """

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    step_s: float
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    host: Link
    disk: Link
    remote: Link | None


ASSUMED = Hardware(
    "one assumed device",
    flops_per_s=250e12,
    memory_bytes_per_s=2e12,
    step_s=2e-3,
    device_bytes=100 * GB,
    host_bytes=1000 * GB,
    disk_bytes=4000 * GB,
    host=Link(40 * GB),
    disk=Link(12 * GB, 1e-4),
    remote=Link(10 * GB, 2e-3),
)
ASSUMED_FOUR = replace(
    ASSUMED,
    name="four assumed devices as one",
    flops_per_s=4 * 250e12,
    memory_bytes_per_s=4 * 2e12,
    step_s=5e-3,
    host=Link(4 * 40 * GB),
)
