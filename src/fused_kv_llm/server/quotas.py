"""Quotas: how many requests and tokens a tenant has in a minute."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from .refusals import RefusedError

__all__ = ["Quota", "Quotas"]

_DEFAULT_TENANT = "default"


class Quota(BaseModel):
    """What one tenant has in a minute; None does not bound it."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    requests_per_minute: int | None = Field(default=None, ge=1)
    """Requests for answers; as many may come at once after a quiet minute."""

    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers, counted when an answer ends."""

    stored_bytes: int | None = Field(default=None, ge=1)
    """KV of documents, with what is stored beside it; documents that would take more are not ingested."""


class _Bucket:
    """An amount that is spent, and comes back evenly within a minute; below zero it is a debt."""

    def __init__(self, per_minute: int, now_s: float) -> None:
        self._most, self._level, self._at_s = per_minute, float(per_minute), now_s

    def missing_s(self, wanted: float, now_s: float) -> float:
        """Return the seconds until as much is there; 0 if it is."""
        self._level = min(self._most, self._level + (now_s - self._at_s) * self._most / 60)
        self._at_s = now_s
        return max(0.0, (wanted - self._level) * 60 / self._most)

    def spend(self, amount: float) -> None:
        """Take an amount, there or not."""
        self._level -= amount


class Quotas:
    """Counts what tenants use; thread-safe.

    Parameters
    ----------
    quotas : mapping of str to Quota
        By tenant; who asks without a key is ``default``. A tenant that is not there has no bounds.
    on_refused : callable
        Called with the tenant, and ``requests`` or ``tokens``, for every request over a quota.
    clock : callable
        Seconds, never going back.
    """

    def __init__(
        self,
        quotas: Mapping[str, Quota],
        on_refused: Callable[[str, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_refused, self._clock, self._lock = on_refused, clock, threading.Lock()
        bounds = {
            (tenant, what): bound
            for tenant, quota in quotas.items()
            for what, bound in (("requests", quota.requests_per_minute), ("tokens", quota.tokens_per_minute))
        }
        self._buckets = {name: _Bucket(bound, clock()) for name, bound in bounds.items() if bound is not None}

    def admit(self, tenant: str) -> None:
        """Count a request of a tenant.

        Raises
        ------
        RefusedError
            If one of the tenant's quotas is used up. The request is not counted then.
        """
        tenant = tenant or _DEFAULT_TENANT
        with self._lock:
            now_s = self._clock()
            for what in ("requests", "tokens"):
                bucket = self._buckets.get((tenant, what))
                missing_s = 0.0 if bucket is None else bucket.missing_s(1, now_s)
                if missing_s > 0:
                    break
            else:
                if (requests := self._buckets.get((tenant, "requests"))) is not None:
                    requests.spend(1)
                return
        self._on_refused(tenant, what)
        wait_s = math.ceil(missing_s)
        raise RefusedError(
            f"The {what} of a minute are used up; ask again in {wait_s} s",
            429,
            kind=what,
            code="rate_limit_exceeded",
            retry_after_s=wait_s,
        )

    def spend(self, tenant: str, tokens: int) -> None:
        """Count the tokens of a prompt and its answer. What goes beyond the quota keeps the next requests waiting."""
        with self._lock:
            if (bucket := self._buckets.get((tenant or _DEFAULT_TENANT, "tokens"))) is not None:
                bucket.missing_s(0, self._clock())
                bucket.spend(tokens)
