"""What came of a simulated trace."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .engine import SimulatedEngine
from .request import SimulatedRequest
from .reuse import PrefixOnly

__all__ = ["hit_rates", "times"]


def times(requests: Sequence[SimulatedRequest], warm_up: int = 0) -> dict[str, float]:
    """Return times to first tokens, latencies and throughput, without the first `warm_up` requests."""
    counted = sorted(requests, key=lambda one: one.arrived_s)[warm_up:]
    ttft = sorted(one.token_s[0] - one.arrived_s for one in counted)
    latency = [one.token_s[-1] - one.arrived_s for one in counted]
    wall_s = max(one.token_s[-1] for one in counted) - counted[0].arrived_s
    return {
        "requests": len(counted),
        "ttft_mean_s": statistics.mean(ttft),
        "ttft_p50_s": statistics.median(ttft),
        "ttft_p95_s": ttft[min(len(ttft) - 1, len(ttft) * 95 // 100)],
        "latency_mean_s": statistics.mean(latency),
        "tokens_per_s": sum(len(one.token_s) for one in counted) / wall_s,
        "requests_per_s": len(counted) / wall_s,
        "wall_s": wall_s,
    }


def hit_rates(engine: SimulatedEngine) -> dict[str, float]:
    """Return the share of chunks by the tier they were opened in, or of chunk tokens that prefixes had."""
    if engine.tiers is not None:
        total = sum(engine.tiers.hits.values())
        return {tier: count / total for tier, count in sorted(engine.tiers.hits.items())}
    if isinstance(engine.reuse, PrefixOnly):
        return {"prefix": engine.reuse.found_tokens / max(1.0, engine.reuse.asked_tokens)}
    return {}
