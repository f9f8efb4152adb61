"""Actors of which some cannot be started: a place is tried again a few times, and the others do the work.

What stands for Ray here answers at once and in order, so no cluster is started; ``test_parts.py`` has one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from fused_kv_llm.errors import FusedKVWarning, IngestionFailedError, ModelError, StoreUnavailableError
from fused_kv_llm.scale import actor_pool
from fused_kv_llm.scale.actor_pool import ActorPool


class RayError(Exception):
    """Ray's own errors, such as that of an actor that died."""


class RayTaskError(RayError):
    """What a task has raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(str(cause))
        self.cause = cause


DIED = RayError("out of memory")
AWAY = RayTaskError(StoreUnavailableError("the store is away"))


class Ray:
    """Actors of which each start, in order, has an outcome; the last one is that of all further starts."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, outcomes: list[Exception | None]) -> None:
        self._outcomes, self.starts, self.killed = outcomes, 0, 0

    def actor(self) -> Any:
        outcome = self._outcomes[min(self.starts, len(self._outcomes) - 1)]
        self.starts += 1
        assert self.starts < 100, "actors are started for ever"
        return _Actor(outcome)

    def kill(self, actor: Any) -> None:
        self.killed += 1

    def get(self, reference: Any) -> Any:
        if isinstance(reference.result, Exception):
            raise reference.result
        return reference.result

    def wait(self, references: list[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        # A start before a task, so that those that fail do so while there is work.
        done = [one for one in references if not isinstance(one.result, int)] or references
        return done[:num_returns], []


class _Reference:
    def __init__(self, result: Any) -> None:
        self.result = result


class _Actor:
    def __init__(self, outcome: Exception | None) -> None:
        self.start, self.work = _method(lambda: outcome or "facts"), _method(lambda number: number * number)


def _method(function: Callable[..., Any]) -> Any:
    return SimpleNamespace(remote=lambda *given: _Reference(function(*given)))


@pytest.fixture(name="pool_of")
def _pool_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(actor_pool, "_AGAIN_AFTER_S", 1e-4)

    def make(count: int, *outcomes: Exception | None) -> tuple[ActorPool[str], Ray]:
        ray = Ray(list(outcomes))
        monkeypatch.setattr(actor_pool, "import_ray", lambda: ray)
        return ActorPool[str](ray.actor, count), ray

    return make


def worked(pool: ActorPool[str], tasks: int = 2000) -> bool:
    return dict(pool.run("work", ((n,) for n in range(tasks)))) == {n: n * n for n in range(tasks)}


def test_a_place_in_which_actors_keep_dying_is_given_up_and_the_others_do_the_work(pool_of: Any) -> None:
    pool, ray = pool_of(2, None, DIED)
    with pytest.warns(FusedKVWarning, match=r"could not be started 4 times and is given up.*out of memory"):
        assert worked(pool)
    assert (ray.starts, pool.replaced, pool.given_up) == (5, 3, 1)


def test_with_nobody_left_it_ends(pool_of: Any) -> None:
    pool, ray = pool_of(2, DIED)
    with pytest.warns(FusedKVWarning), pytest.raises(IngestionFailedError, match=r"keep dying.*out of memory"):
        pool.facts()
    assert ray.starts == 8


def test_a_store_that_is_away_while_actors_start_is_tried_again(pool_of: Any) -> None:
    pool, ray = pool_of(1, AWAY, AWAY, AWAY, None)
    assert pool.facts() == "facts"
    assert worked(pool)
    assert (ray.starts, ray.killed, pool.replaced, pool.given_up) == (4, 3, 0, 0)
    pool, ray = pool_of(1, AWAY)
    with pytest.raises(StoreUnavailableError, match="away"):
        pool.facts()
    assert ray.starts == 4


def test_what_cannot_work_at_all_is_not_tried_again(pool_of: Any) -> None:
    pool, ray = pool_of(1, RayTaskError(ModelError("no such model")), None)
    with pytest.raises(ModelError, match="no such model"):
        pool.facts()
    assert ray.starts == 1


def test_attempts_wait_longer_each_time(pool_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now_s = [0.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now_s[0] += seconds

    monkeypatch.setattr(actor_pool, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s[0]))
    monkeypatch.setattr(actor_pool, "_AGAIN_AFTER_S", 1.0)
    pool, _ = pool_of(1, DIED, DIED, DIED, None)
    assert pool.facts() == "facts"
    assert slept == [1.0, 2.0, 4.0]
