"""Waiting for what happens in the background."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from fused_kv_llm.store import KVStore


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Return when the condition holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"nothing happened within {timeout_s:g} s")
        time.sleep(0.005)


def unending(ids: Any, logits: torch.Tensor) -> torch.Tensor:
    """Keep an answer from ending, and slow it down to a hundredth of a second per token; used as a `constraint`.

    The end is token 2, as SmolLM2's tokenizer has it.
    """
    time.sleep(0.01)
    logits[2] = -torch.inf
    return logits


def exit_status(child: int, timeout_s: float = 20.0) -> int | None:
    """Return the status of a forked process when it ends; one that does not is killed, and there is None."""
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return status
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def wait_until_in_memory(store: KVStore, keys: Iterable[str | None]) -> None:
    """Return when the memory tier holds these chunks; fail if it does not in time."""
    rows = store.rows(key for key in keys if key is not None)
    assert rows

    def are_resident() -> bool:
        # A file that is opened here just when the prefetch opens it would take its place, and not be kept.
        if store.stats().memory_chunks < len(rows):
            return False
        tiers = []
        for key, row in rows.items():
            stored = store.open(key, row.token_ids)
            assert stored is not None
            tiers.append(stored.tier)
            stored.close()
        return set(tiers) == {"memory"}

    wait_until(are_resident)
