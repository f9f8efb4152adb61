"""Which implementation of an operator runs: Triton on CUDA devices, plain torch elsewhere.

``FUSED_KV_KERNELS=torch`` or ``triton`` in the environment overrides the choice. Operands that the implementation does
not support raise an error that names the operator, the dtype, the shapes and the device; there is no silent fallback.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = ["UnsupportedOperandsError", "refuse_in_triton", "triton_op", "use_triton"]

_VARIABLE = "FUSED_KV_KERNELS"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_DIM = 512
_LARGEST_GROUP = 16
# Triton generates no code for what came before Turing; bfloat16 came with Ampere.
_LEAST_CAPABILITY = (7, 5)
_BFLOAT16_CAPABILITY = (8, 0)
# While a kernel runs, Triton's interpreter replaces methods of Triton's classes, and knows one place in the grid: both
# for all threads.
_INTERPRETER = threading.RLock()


class UnsupportedOperandsError(ValueError):
    """No implementation takes these tensors on this device."""


def _describe(operands: dict[str, Tensor]) -> str:
    return ", ".join(
        f"{name}: {str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}" for name, x in operands.items()
    )


def use_triton(op: str, *indices: Tensor | None, **operands: Tensor) -> bool:
    """Whether an operator runs in Triton on these tensors.

    Parameters
    ----------
    op : str
        The operator's name, for messages.
    *indices : Tensor or None
        Positions, lengths and tables it reads; they must be where the operands are.
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
    if wanted == "torch" or (wanted == "auto" and not any(x.is_cuda for x in operands.values())):
        return False
    reason = _why_not(operands, [x for x in indices if x is not None])
    if reason:
        refuse_in_triton(op, reason, **operands)
    return True


def refuse_in_triton(op: str, reason: str, **operands: Tensor) -> NoReturn:
    """Say that an operator does not run in Triton on these tensors, why, and what does.

    Parameters
    ----------
    op : str
        The operator's name.
    reason : str
        A clause: "because ...", "which ...".
    **operands : Tensor
        The floating tensors it computes with, by name.

    Raises
    ------
    UnsupportedOperandsError
        Always.
    """
    msg = f"{op} cannot run in Triton, {reason} ({_describe(operands)}). {_VARIABLE}=torch runs it in plain torch."
    raise UnsupportedOperandsError(msg)


def _why_not(operands: dict[str, Tensor], indices: list[Tensor]) -> str | None:
    tensors = list(operands.values())
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    groups = operands["q"].shape[-3] / operands["k"].shape[-3] if {"q", "k"} <= operands.keys() else 1.0
    reasons = {
        "which is not installed": importlib.util.find_spec("triton") is None,
        "because its tensors are on different devices": len({x.device for x in tensors}) > 1,
        f"because its positions are on {indices[0].device if indices else None}": any(
            x.device != tensors[0].device for x in indices
        ),
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
    return next((reason for reason, holds in reasons.items() if holds), None) or _too_old(tensors[0])


def _too_old(x: Tensor) -> str | None:
    if x.device.type != "cuda" or torch.version.hip is not None:
        return None
    has = torch.cuda.get_device_capability(x.device)
    least = _BFLOAT16_CAPABILITY if x.dtype == torch.bfloat16 else _LEAST_CAPABILITY
    if has >= least:
        return None
    needs = f"which needs compute capability {least[0]}.{least[1]} for {str(x.dtype).removeprefix('torch.')}"
    return f"{needs}, and {x.device} has {has[0]}.{has[1]}"


def triton_op(name: str, device: torch.device) -> Callable[..., Any]:
    """Return the function of an operator in Triton; importing this package does not import Triton.

    In Triton's interpreter, threads take turns.

    Parameters
    ----------
    name : str
        The operator's, which is its file's.
    device : torch.device
        Where its tensors are: Triton launches on the current device, wherever its arguments lie.
    """
    run: Callable[..., Any] = getattr(importlib.import_module(f"fused_kv_kernels.triton_ops.{name}"), name)

    @functools.wraps(run)
    def on_device(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as entered:
            if os.environ.get("TRITON_INTERPRET") == "1":
                entered.enter_context(_INTERPRETER)
            if device.type == "cuda":
                entered.enter_context(torch.cuda.device(device))
            return run(*args, **kwargs)

    return on_device
