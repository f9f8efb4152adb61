"""What a server has done since it began, tenant by tenant: for people, where Prometheus has its own numbers."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fused_kv_llm.report import FusionReport

from .history_schema import RequestStatus
from .savings import Saving

__all__ = ["Activity", "Ended", "tokens_of"]

_SOURCES = ("header", "prefix", "chunk", "recomputed", "fresh")
_STATUSES: tuple[RequestStatus, ...] = ("ok", "cancelled", "refused", "failed")
_MOST_REMEMBERED = 5000
_MOST_PARTS = 200


@dataclass(frozen=True, slots=True)
class Ended:
    """What is counted of one request.

    Parameters
    ----------
    at_s : float
        When it ended, in seconds since 1970.
    status : {"ok", "cancelled", "refused", "failed"}
    ttft_s : float or None
    tokens : dict of str to int
        Prompt tokens by what became of them, and those of the answer.
    verdicts : dict of str to int
    saving : Saving or None
    """

    at_s: float
    status: RequestStatus
    ttft_s: float | None = None
    tokens: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, int] = field(default_factory=dict)
    saving: Saving | None = None


class _Totals:
    """Sums of requests."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.verdicts: Counter[str] = Counter()
        self.saved: defaultdict[str, float] = defaultdict(float)
        self.unknown = 0

    def add(self, ended: Ended) -> None:
        self.requests[ended.status] += 1
        self.tokens.update(ended.tokens)
        self.verdicts.update(ended.verdicts)
        if ended.saving is not None:
            for name, seconds in ended.saving._asdict().items():
                self.saved[name] += seconds
        elif ended.tokens:
            self.unknown += 1

    def to_dict(self, ttft_s: Sequence[float]) -> dict[str, Any]:
        tokens = {name: self.tokens[name] for name in (*_SOURCES, "completion")}
        looked_up = sum(tokens[name] for name in _SOURCES) - tokens["header"]
        saved = {name: self.saved[name] for name in Saving._fields}
        return {
            "requests": {status: self.requests[status] for status in _STATUSES},
            "ttft_s": {"p50": _quantile(ttft_s, 0.5), "p95": _quantile(ttft_s, 0.95), "of": len(ttft_s)},
            "tokens": tokens,
            # Of tokens, not of requests; the fixed header, which is always there, counts as neither.
            "hit_rates": {name: tokens[name] / looked_up if looked_up else None for name in ("prefix", "chunk")},
            "saved": saved | {"saved_s": Saving(**saved).saved_s, "requests_unknown": self.unknown},
            "verdicts": dict(self.verdicts),
        }


class Activity:
    """Counts the requests of each tenant; thread-safe.

    Parameters
    ----------
    clock : callable
        Seconds since 1970.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self.since_s = clock()
        self._open: Counter[str] = Counter()
        self._totals: defaultdict[str, _Totals] = defaultdict(_Totals)
        self._recent: defaultdict[str, deque[Ended]] = defaultdict(lambda: deque(maxlen=_MOST_REMEMBERED))
        self._parts: defaultdict[str, dict[str | None, _Totals]] = defaultdict(dict)

    def now_s(self) -> float:
        """Return the time by which requests end."""
        return self._clock()

    def began(self, tenant: str) -> None:
        """Count a request that is open from now on."""
        with self._lock:
            self._open[tenant] += 1

    def ended(self, tenant: str, ended: Ended, part: str | None = None) -> None:
        """Count a request that has ended.

        Parameters
        ----------
        tenant : str
        ended : Ended
        part : str or None
            The further name that the tenant's client gave. Clients think of names: those after the first 200 are
            counted with the requests that have none.
        """
        with self._lock:
            parts = self._parts[tenant]
            known = part if part in parts or len(parts) < _MOST_PARTS else None
            parts.setdefault(known, _Totals()).add(ended)
            self._open[tenant] -= 1
            self._totals[tenant].add(ended)
            self._recent[tenant].append(ended)

    def of(self, tenant: str, window_s: float) -> dict[str, Any]:
        """Return a tenant's numbers: those since the server began, and those of the last seconds.

        Quantiles are of the newest 5,000 requests at most, and so are the numbers of the last seconds.
        """
        with self._lock:
            totals, known = self._totals[tenant], list(self._recent[tenant])
            whole = totals.to_dict(_times(known))
            is_open = self._open[tenant]
        now_s, recent = self._clock(), _Totals()
        newest = [one for one in known if one.at_s > now_s - window_s]
        for one in newest:
            recent.add(one)
        return {
            "now_s": now_s,
            "since_s": self.since_s,
            "open": is_open,
            "since_start": whole,
            "recent": recent.to_dict(_times(newest)) | {"seconds": window_s},
        }

    def parts(self, tenant: str) -> dict[str | None, dict[str, Any]]:
        """Return a tenant's numbers since the server began, apart by the names that its clients gave."""
        with self._lock:
            return {part: totals.to_dict(()) for part, totals in self._parts.get(tenant, {}).items()}


def tokens_of(report: FusionReport) -> dict[str, int]:
    """Return the tokens of a prompt by what became of them."""
    return {
        "header": report.prefix_tokens - report.prefix_cache_tokens,
        "prefix": report.prefix_cache_tokens,
        "chunk": report.reused_tokens,
        "recomputed": report.recomputed_tokens,
        "fresh": report.fresh_tokens,
    }


def _times(ended: Iterable[Ended]) -> list[float]:
    return sorted(one.ttft_s for one in ended if one.ttft_s is not None)


def _quantile(ordered: Sequence[float], share: float) -> float | None:
    """Return the smallest value that is not below a share of the others."""
    if not ordered:
        return None
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
