"""Seconds saved: what the prompt tokens that were not computed would have cost, less what it cost to have their KV."""

from __future__ import annotations

from typing import NamedTuple

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.report import FusionReport

__all__ = ["Saving", "Savings"]

_MEASURED_TOKENS = 2700
"""About as many tokens as a measurement computes."""
_LONGEST_S = 15.0
"""A measurement that takes longer would hold up requests; a long ingestion makes it."""


class Saving(NamedTuple):
    """What reuse spared one request, an estimate.

    Parameters
    ----------
    prefix_s, chunk_s : float
        Seconds that computing the tokens would have taken which earlier requests had left, and which stored chunks had.
    spent_s : float
        Seconds in which stored KV was loaded, and in which it was chosen what to recompute. Loading counts in full,
        also where other requests were answered meanwhile, so that too little is saved rather than too much.
    """

    prefix_s: float
    chunk_s: float
    spent_s: float

    @property
    def saved_s(self) -> float:
        """The difference; negative where reuse cost more than it spared."""
        return self.prefix_s + self.chunk_s - self.spent_s


class Savings:
    """Estimates what requests were spared, from times of prefills that this machine took.

    Parameters
    ----------
    engine : FusedKVEngine
        Its times are those of all tenants.
    """

    def __init__(self, engine: FusedKVEngine) -> None:
        self._engine = engine
        self._token_s: float | None = None

    def of(self, report: FusionReport) -> Saving | None:
        """Return what a request was spared; None while it is not known what tokens cost.

        A prompt's tokens behind its fixed header count alike, wherever they stand in it.
        """
        seconds = report.seconds
        if report.computed_tokens and "fuse" in seconds:
            self._token_s = seconds["fuse"] / report.computed_tokens
        header = report.prefix_tokens - report.prefix_cache_tokens
        tokens = report.prompt_tokens - header
        full_s = self._engine.corpus.cost.prefill_s(header, tokens)
        if full_s is None:
            return None
        each_s = full_s / max(1, tokens)
        spent_s = report.read_s + sum(seconds.get(stage, 0.0) for stage in ("load", "probe", "select"))
        return Saving(each_s * report.prefix_cache_tokens, each_s * report.reused_tokens, spent_s)

    def measure(self) -> bool:
        """Take the times, once for a model and a machine, if nobody is being answered and it does not take long.

        Returns
        -------
        bool
            Whether they were taken now.
        """
        cost = self._engine.corpus.cost
        if cost.seconds is not None or self._token_s is None or self._engine.requests.is_busy:
            return False
        if self._token_s * _MEASURED_TOKENS > _LONGEST_S:
            return False
        self._engine.corpus.measure_cost()
        return cost.seconds is not None
