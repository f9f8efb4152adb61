"""What the modules of a model know of the forward pass they are in.

A model serves fused passes and its owner's own forwards, perhaps in several threads at once. Only in a fused pass do
its modules take shortcuts; otherwise they are transformers' own, bit by bit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["fused_forward", "in_fused_forward", "wants_last_row_only"]

_pass = threading.local()


@contextmanager
def fused_forward(*, last_row_only: bool = False) -> Iterator[None]:
    """Within, this thread runs a fused pass; of its last layer perhaps only the last row is wanted."""
    before = (in_fused_forward(), wants_last_row_only())
    _pass.fused, _pass.last_row_only = True, last_row_only
    try:
        yield
    finally:
        _pass.fused, _pass.last_row_only = before


def in_fused_forward() -> bool:
    """Return whether this thread is in a fused pass; never while a model is compiled."""
    return not torch.compiler.is_compiling() and getattr(_pass, "fused", False)


def wants_last_row_only() -> bool:
    """Return whether this thread's fused pass wants the next token's logits and nothing else."""
    return not torch.compiler.is_compiling() and getattr(_pass, "last_row_only", False)
