"""Answer one prompt in several ways and time the first token: plain transformers, and the engine at several ratios."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from fused_kv_llm.config import RecomputeRatio
from fused_kv_llm.demo.page_cache import drop_page_cache
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.tuning import full_prefill

__all__ = ["Row", "compare", "medians"]

_PLAIN = "plain transformers"


@dataclass(frozen=True, slots=True)
class Row:
    """One way to answer a prompt.

    Parameters
    ----------
    name : str
    cold_s : float or None
        Seconds to the first token when the chunks' KV is read from the disk; None for a way without stored KV.
    warm_s : float
        Seconds to the first token when the chunks' KV is in memory.
    speedup : float
        Plain transformers' time over `warm_s`.
    computed_tokens : int
        Prompt tokens that went through the model.
    prompt_tokens : int
    answer : str
    """

    name: str
    cold_s: float | None
    warm_s: float
    speedup: float
    computed_tokens: int
    prompt_tokens: int
    answer: str


def _name_of(ratio: RecomputeRatio) -> str:
    """Return what a recomputation ratio is called in tables."""
    if isinstance(ratio, str):
        return f"fused ({ratio})"
    special = {0.0: "full reuse (ratio 0)", 1.0: "no stored KV (ratio 1)"}
    return special.get(ratio, f"fused (ratio {ratio:g})")


def compare(
    engine: FusedKVEngine,
    prompt: str,
    *,
    ratios: Sequence[RecomputeRatio] = (1.0, 0.15, 0.0),
    selector: str | None = None,
    max_tokens: int = 64,
    stop: Sequence[str] = (),
) -> list[Row]:
    """Answer one prompt greedily in several ways and measure the time to the first token.

    Parameters
    ----------
    engine : FusedKVEngine
        Its memory tier is emptied before each cold measurement.
    prompt : str
    ratios : sequence of float or "adaptive"
        Recomputation ratios, one row each after the row of plain transformers.
    selector : str or None
        None takes the engine's.
    max_tokens : int
    stop : sequence of str
        An answer ends before the first of these strings, in every row.

    Returns
    -------
    list of Row
        The first is plain transformers.
    """
    plain = full_prefill(engine, prompt, max_tokens=max_tokens, stop=stop)
    rows = [Row(_PLAIN, None, plain.ttft_s, 1.0, plain.prompt_tokens, plain.prompt_tokens, plain.text)]
    for ratio in ratios:
        cold_s = None
        if ratio != 1:
            engine.store.drop_memory()
            drop_page_cache(engine.store.kv_dir)
            engine.clear_prefix_cache()
            cold_s = engine.generate(prompt, max_tokens=1, recompute_ratio=ratio, selector=selector).report.ttft_s
        # Every way begins with what the store has, not with what the way before it has left.
        engine.clear_prefix_cache()
        made = engine.generate(prompt, max_tokens=max_tokens, stop=stop, recompute_ratio=ratio, selector=selector)
        warm_s, computed = made.report.ttft_s, made.report.computed_tokens
        name, speedup = _name_of(ratio), plain.ttft_s / warm_s
        rows.append(Row(name, cold_s, warm_s, speedup, computed, plain.prompt_tokens, made.text))
    return rows


def medians(compared: Sequence[Sequence[Row]]) -> list[Row]:
    """Return one row a way: the medians of several prompts, without answers; speed-ups are those of the medians."""
    rows: list[Row] = []
    for same_way in zip(*compared, strict=True):
        cold = [row.cold_s for row in same_way if row.cold_s is not None]
        warm_s = statistics.median(row.warm_s for row in same_way)
        rows.append(
            Row(
                name=same_way[0].name,
                cold_s=statistics.median(cold) if cold else None,
                warm_s=warm_s,
                speedup=(rows[0].warm_s if rows else warm_s) / warm_s,
                computed_tokens=round(statistics.median(row.computed_tokens for row in same_way)),
                prompt_tokens=round(statistics.median(row.prompt_tokens for row in same_way)),
                answer="",
            )
        )
    return rows
