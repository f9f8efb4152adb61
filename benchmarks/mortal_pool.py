"""A pool of ingestion actors one of which is killed in the middle of a pass, for tests and benchmarks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from fused_kv_llm.scale.actor_pool import ActorPool

__all__ = ["MortalPool", "mortal"]


class MortalPool(ActorPool[Any]):
    """Kills the process of its first actor once so many batches of a method are done."""

    method, after = "prefill", 2

    def __init__(self, *arguments: Any) -> None:
        self._pids: list[int] = []
        super().__init__(*arguments)

    def _began(self, started: Any) -> None:
        before = len(self._ready)
        super()._began(started)
        if len(self._ready) > before:
            self._pids.append(self._ray.get(self._ready[-1].__ray_call__.remote(lambda actor: os.getpid())))

    def run(self, method: str, tasks: Any) -> Iterator[tuple[int, Any]]:
        """Run tasks as the pool does."""
        for count, done in enumerate(super().run(method, tasks), 1):
            if method == self.method and count == self.after:
                os.kill(self._pids[0], signal.SIGKILL)
            yield done


def mortal(method: str, after: int) -> type[MortalPool]:
    """Return a pool whose first actor dies after so many batches of a method."""
    return type("MortalPool", (MortalPool,), {"method": method, "after": after})
