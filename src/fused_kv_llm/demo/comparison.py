"""One prompt, several ways: plain transformers, full reuse, selective recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.report import FusionReport
from fused_kv_llm.tuning import full_prefill

__all__ = ["Row", "as_table", "compare", "describe"]


@dataclass(frozen=True, slots=True)
class Row:
    """One way to answer.

    Parameters
    ----------
    name : str
    ttft_s : float
        Seconds to the first token.
    speedup : float
        Plain transformers' time over this one's.
    computed_tokens : int
        Prompt tokens that went through the model.
    prompt_tokens : int
    answer : str
    """

    name: str
    ttft_s: float
    speedup: float
    computed_tokens: int
    prompt_tokens: int
    answer: str


def compare(
    engine: FusedKVEngine,
    prompt: str,
    *,
    ratios: Sequence[float] = (0.0, 0.15),
    selector: str | None = None,
    max_tokens: int = 64,
) -> list[Row]:
    """Answer one prompt greedily in several ways and measure the time to the first token.

    Parameters
    ----------
    engine : FusedKVEngine
    prompt : str
    ratios : sequence of float
        Recomputation ratios, one row each after the row of plain transformers.
    selector : str or None
        None takes the engine's.
    max_tokens : int

    Returns
    -------
    list of Row
        The first is plain transformers.
    """
    plain = full_prefill(engine, prompt, max_tokens=max_tokens)
    rows = [Row("plain transformers", plain.ttft_s, 1.0, plain.prompt_tokens, plain.prompt_tokens, plain.text)]
    for ratio in ratios:
        made = engine.generate(prompt, max_tokens=max_tokens, recompute_ratio=ratio, selector=selector)
        report = made.report
        name = "full reuse (ratio 0)" if ratio == 0 else f"fused (ratio {ratio:g})"
        speedup = plain.ttft_s / report.ttft_s
        rows.append(Row(name, report.ttft_s, speedup, report.computed_tokens, report.prompt_tokens, made.text))
    return rows


def as_table(rows: Sequence[Row]) -> Table:
    """Lay out a comparison for a terminal."""
    table = Table(title=f"One prompt of {rows[0].prompt_tokens:,} tokens", title_justify="left")
    table.add_column("")
    table.add_column("first token", justify="right", no_wrap=True)
    table.add_column("speed-up", justify="right")
    table.add_column("tokens computed", justify="right")
    table.add_column("answer", overflow="fold")
    for row in rows:
        table.add_row(
            row.name,
            f"{row.ttft_s:.2f} s",
            f"{row.speedup:.1f}x",
            f"{row.computed_tokens:,}",
            escape(" ".join(row.answer.split())),
        )
    return table


def describe(report: FusionReport) -> str:
    """Return one line about a request for people."""
    loaded = [f"{nbytes / 1e6:.0f} MB from {tier}" for tier, nbytes in report.bytes_loaded.items() if nbytes]
    if beside := sum(report.sidecar_bytes_loaded.values()):
        loaded.append(f"{beside / 1e6:.0f} MB of sidecars")
    parts = [
        f"first token after {report.ttft_s:.2f} s",
        f"{report.prompt_tokens:,} prompt tokens: {report.cached_tokens:,} reused, "
        f"{report.recomputed_tokens:,} recomputed, {report.fresh_tokens:,} fresh",
        f"{report.chunks_found} chunks found" + (f" ({', '.join(loaded)})" if loaded else ""),
    ]
    if report.chunks_missed:
        parts.append(f"{report.chunks_missed} could not be read")
    return " | ".join(parts)
