"""Tenants' tasks are taken in turn, each tenant's in its order."""

from __future__ import annotations

import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.server.turns import Turns


@given(st.lists(st.sampled_from("abc"), max_size=30))
def test_no_tenant_waits_for_more_than_one_task_of_each_other(tenants: list[str]) -> None:
    turns = Turns[tuple[str, int]](100)
    for number, tenant in enumerate(tenants):
        assert turns.put(tenant, (tenant, number))
    taken = [turns.take() for _ in tenants]
    for tenant in "abc":
        own = [number for name, number in taken if name == tenant]
        assert own == sorted(own)
        places = [place for place, (name, _) in enumerate(taken) if name == tenant]
        assert all(later - earlier <= 3 for earlier, later in pairwise(places))


def test_each_tenant_has_a_limit_of_its_own() -> None:
    turns = Turns[int](2)
    assert [turns.put("a", number) for number in range(3)] == [True, True, False]
    assert (turns.is_full("a"), turns.is_full("b"), turns.put("b", 9)) == (True, False, True)
    assert [turns.take() for _ in range(3)] == [0, 9, 1]
    assert not turns.is_full("a")


def test_who_waits_is_let_go() -> None:
    turns, found = Turns[int](2), list[int | None]()
    thread = threading.Thread(target=lambda: found.append(turns.take()))
    thread.start()
    turns.close()
    thread.join(5)
    assert found == [None]
