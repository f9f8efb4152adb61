"""The step loops of a process: one for each model, whichever engines have it."""

from __future__ import annotations

import atexit
from typing import Any

from fused_kv_llm.model import OfModel, lock_of

from .step_loop import StepLoop

__all__ = ["loop_of"]

_loops = OfModel(lambda model: StepLoop(lock_of(model)))


def loop_of(model: Any) -> StepLoop:
    """Return the step loop of a transformers model; engines that share its weights share it."""
    return _loops(model)


@atexit.register
def _close_all() -> None:
    for loop in _loops.all():
        loop.close()
