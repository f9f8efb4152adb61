"""The step loops of a process: one for each model, whichever engines have it."""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

from fused_kv_llm.model import lock_of

from .step_loop import StepLoop

__all__ = ["loop_of"]

_loops: WeakKeyDictionary[Any, StepLoop] = WeakKeyDictionary()
_finding = threading.Lock()


def loop_of(model: Any) -> StepLoop:
    """Return the step loop of a transformers model; engines that share its weights share it."""
    with _finding:
        if model not in _loops:
            _loops[model] = StepLoop(lock_of(model))
        return _loops[model]


def _after_fork() -> None:
    """Begin anew in a forked process, where the thread is missing that may have held what guards a loop."""
    global _finding  # noqa: PLW0603 - a lock that was held cannot be let go here
    _finding = threading.Lock()
    for loop in list(_loops.values()):
        loop.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _close_all() -> None:
    for loop in list(_loops.values()):
        loop.close()
