"""While other processes keep the cores busy, idle OpenMP workers are there, which make the others sleep early."""

from __future__ import annotations

import threading

import pytest
from busy import busy_process
from waiting import wait_until

from fused_kv_llm.serving import crowding
from fused_kv_llm.serving.crowding import CrowdedCores
from fused_kv_llm.thread_pool import available_cores, loaded_openmp


def _is_held() -> bool:
    return any(thread.name == "fused-kv-idle" for thread in threading.enumerate())


@pytest.mark.skipif(loaded_openmp() is None, reason="torch has not loaded GNU's OpenMP")
def test_others_that_want_the_cores_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crowding, "_LOOK_EVERY_S", 0.05)
    cores = CrowdedCores()

    def is_crowded() -> bool:
        cores.look()
        return cores.is_crowded

    with busy_process(2 * available_cores()):
        wait_until(is_crowded, 30.0)
        assert _is_held()
    cores.end()
    wait_until(lambda: not _is_held())


def _of(monkeypatch: pytest.MonkeyPatch, *readings: tuple[float, float, float, float]) -> CrowdedCores:
    made = iter(readings)
    monkeypatch.setattr(CrowdedCores, "_now", staticmethod(lambda: next(made)))
    monkeypatch.setattr(crowding, "_IdleWorkers", type("_", (), {"end": lambda self: None}))
    monkeypatch.setattr(crowding.time, "monotonic", lambda: 1e9)
    return CrowdedCores()


def test_what_counts_as_crowded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings: clock, own seconds, busy seconds of the cores, idle seconds of the cores."""
    cores = _of(
        monkeypatch,
        (0.0, 0.0, 0.0, 0.0),
        (1.0, 2.0, 2.0, 0.0),  # this process alone uses both cores
        (2.0, 3.0, 4.0, 0.0),  # another one has half of the time
        (3.0, 3.5, 5.3, 0.7),  # still there, while this one waits
        (4.0, 4.5, 6.3, 1.7),  # gone
    )
    seen = []
    for _ in range(4):
        cores.look()
        seen.append(cores.is_crowded)
    assert seen == [False, True, True, False]
