"""The tree of KV that requests leave behind, as an engine uses it: its policy and its levels."""

from __future__ import annotations

import torch
from torch import Tensor

from fused_kv_llm.kv import HostLevel, PrefixTree, RankedEviction, RecomputeSeconds
from fused_kv_llm.serving import Limits

__all__ = ["open_prefixes"]


def open_prefixes(
    policy: str, limits: Limits, device: torch.device, seconds: RecomputeSeconds | None = None
) -> PrefixTree:
    """Return an empty tree.

    Parameters
    ----------
    policy : str
        Name of a policy of the store.
    limits : Limits
        How many bytes it may keep.
    device : torch.device
        The model's. What has to leave a device that is not the host goes to the host.
    seconds : callable or None
        What computing tokens costs, in any unit; None takes every token to cost the same.

    Returns
    -------
    PrefixTree
    """
    host = None
    if device.type != "cpu" and limits.prefix_host_bytes > 0:
        host = HostLevel(limits.prefix_host_bytes, _to_host, lambda tensor: tensor.to(device))
    return PrefixTree(limits.prefix_bytes, RankedEviction(policy, seconds), host)


def _to_host(tensor: Tensor) -> Tensor:
    return tensor.to("cpu")
