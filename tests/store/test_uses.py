"""Uses of chunks: when they were, and when they are due to be written."""

from __future__ import annotations

from fused_kv_llm.store.uses import UseLog


def test_uses_are_dated_by_the_calendar_and_due_by_the_clock() -> None:
    day_s, now_s = 5e9, 0.0
    uses = UseLog(lambda: day_s, lambda: now_s)
    assert not uses.hit("a", "disk")
    now_s = 9.0
    day_s = 6e9
    assert not uses.hit("a", "memory")
    now_s = 11.0
    assert uses.hit("b", "disk")
    pending, counts = uses.take()
    assert [(use.times, use.used_s) for use in pending.values()] == [(2, 6e9), (1, 6e9)]
    assert counts == {"hits_memory": 1, "hits_disk": 2}
    # From then on they wait anew.
    assert not uses.hit("a", "disk")
