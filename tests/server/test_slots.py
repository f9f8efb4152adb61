"""Slots: no tenant takes all of them."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from fused_kv_llm.server.refusals import RefusedError
from fused_kv_llm.server.slots import Slots


def test_a_tenant_does_not_take_all_of_them() -> None:
    slots = Slots(4, 2, "measurements")
    with ExitStack() as entered:
        for tenant in ("a", "a", "b"):
            entered.enter_context(slots.one(tenant))
        with pytest.raises(RefusedError, match="2 of your measurements") as caught, slots.one("a"):
            pass
        assert (caught.value.status, caught.value.retry_after_s) == (429, 5)
        entered.enter_context(slots.one("c"))
        with pytest.raises(RefusedError, match="4 measurements"), slots.one("d"):
            pass
    with ExitStack() as entered:
        for tenant in "aabb":
            entered.enter_context(slots.one(tenant))


def test_what_fails_gives_its_slot_back() -> None:
    slots = Slots(2, 1, "measurements")
    for _ in range(3):
        with pytest.raises(ValueError, match="broken"), slots.one("a"):
            raise ValueError("broken")
