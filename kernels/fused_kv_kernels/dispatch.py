"""Which implementation of an operator runs: Triton on CUDA devices, plain torch elsewhere.

``FUSED_KV_KERNELS=torch`` or ``triton`` in the environment overrides that. What an implementation cannot do is an
error that names the operator, the dtype, the shapes and the device; there is no silent slow path.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

__all__ = ["UnsupportedOperandsError", "triton_op", "use_triton"]

_VARIABLE = "FUSED_KV_KERNELS"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_DIM = 256
_LARGEST_GROUP = 16


class UnsupportedOperandsError(ValueError):
    """No implementation takes these tensors on this device."""


def _describe(operands: dict[str, Tensor]) -> str:
    return ", ".join(
        f"{name}: {str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}" for name, x in operands.items()
    )


def use_triton(op: str, **operands: Tensor) -> bool:
    """Whether an operator runs in Triton on these tensors.

    Parameters
    ----------
    op : str
        The operator's name, for messages.
    **operands : Tensor
        The floating tensors it computes with, by name.

    Returns
    -------
    bool
        False: in plain torch.

    Raises
    ------
    UnsupportedOperandsError
        If Triton is to run and cannot: no Triton, no device it runs on, or a dtype, layout or shape it does not take.
    ValueError
        If the environment variable holds anything else than ``torch``, ``triton``, ``auto`` or nothing.
    """
    wanted = os.environ.get(_VARIABLE) or "auto"
    if wanted not in ("auto", "torch", "triton"):
        msg = f"{_VARIABLE}={wanted!r} is unknown: use torch, triton or auto"
        raise ValueError(msg)
    on_cuda = any(x.device.type == "cuda" for x in operands.values())
    if wanted == "torch" or (wanted == "auto" and not on_cuda):
        return False
    reason = _why_not(operands)
    if reason:
        msg = f"{op} cannot run in Triton, {reason} ({_describe(operands)}). {_VARIABLE}=torch runs it in plain torch."
        raise UnsupportedOperandsError(msg)
    return True


def _why_not(operands: dict[str, Tensor]) -> str | None:
    tensors = list(operands.values())
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    groups = operands["q"].shape[-3] / operands["k"].shape[-3] if {"q", "k"} <= operands.keys() else 1.0
    reasons = {
        "which is not installed": importlib.util.find_spec("triton") is None,
        "because its tensors are on different devices": len({x.device for x in tensors}) > 1,
        "which needs a CUDA device, or TRITON_INTERPRET=1 to be tested without one": not interpreted
        and any(x.device.type != "cuda" for x in tensors),
        "because its tensors must all be float32, all bfloat16 or all float16": len({x.dtype for x in tensors}) > 1
        or tensors[0].dtype not in _DTYPES,
        "because the last axis of its tensors must be contiguous": any(
            x.stride(-1) != 1 and x.shape[-1] > 1 and x.numel() > 0 for x in tensors
        ),
        f"because heads may have at most {_LARGEST_DIM} dimensions": any(x.shape[-1] > _LARGEST_DIM for x in tensors),
        f"because query heads must be 1 to {_LARGEST_GROUP} times as many as key heads": groups % 1 != 0
        or groups > _LARGEST_GROUP,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def triton_op(name: str) -> Any:
    """Return the function of an operator in Triton; importing this package does not import Triton."""
    return getattr(importlib.import_module(f"fused_kv_kernels.triton_ops.{name}"), name)
