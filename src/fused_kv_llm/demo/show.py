"""What the terminal shows of a comparison: sources, times and answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fused_kv_llm.demo.comparison import Row
from fused_kv_llm.demo.passages import FoundPassage, Passage
from fused_kv_llm.report import FusionReport

__all__ = ["answers", "describe", "explain", "sources", "times"]


def sources(passages: Sequence[Passage]) -> RenderableType:
    """Return the retrieved passages, one line each: the file, the score if there is one, how the passage begins."""
    folder = _common_folder(passages)
    lines = [Text(f"{len(passages)} passages in the prompt, the nearest to the question first:")]
    for passage in passages:
        begins = " ".join(passage.text.split())
        score = f" ({passage.score:.2f})" if isinstance(passage, FoundPassage) else ""
        file = os.path.relpath(passage.source, folder)
        lines.append(Text(f"  {file}{score}: {begins}", no_wrap=True, overflow="ellipsis"))
    return Group(*lines)


def _common_folder(passages: Sequence[Passage]) -> str:
    folders = {str(Path(passage.source).absolute().parent) for passage in passages}
    return os.path.commonpath(folders)


def times(rows: Sequence[Row], title: str) -> RenderableType:
    """Lay out the times of a comparison."""
    table = Table(title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in ("cold", "warm", "speed-up (warm)", "tokens computed"):
        table.add_column(column, justify="right")
    for row in rows:
        cold = "-" if row.cold_s is None else f"{row.cold_s:.2f} s"
        table.add_row(row.name, cold, f"{row.warm_s:.2f} s", f"{row.speedup:.1f}x", f"{row.computed_tokens:,}")
    return table


def answers(rows: Sequence[Row]) -> RenderableType:
    """Return every answer at the terminal's full width; ways that gave the same answer share it."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(" ".join(row.answer.split()), []).append(row.name)
    parts: list[RenderableType] = []
    for answer, ways in names.items():
        parts += [Text(", ".join(ways) + ":", style="bold"), Padding(Text(answer), (0, 0, 0, 2))]
    return Group(*parts)


def explain(rows: Sequence[Row]) -> RenderableType:
    """Say what cold and warm are, and where the speed-up comes from.

    Parameters
    ----------
    rows : sequence of Row
        Plain transformers, ratio 1, the fused answer, and any others.
    """
    plain, computed, fused = rows[:3]
    operators, reuse = plain.warm_s / computed.warm_s, computed.warm_s / fused.warm_s
    lines = Table.grid(padding=(0, 2))
    lines.add_row("cold", "seconds to the first token when the passages' KV is read from the disk")
    lines.add_row("warm", "seconds to the first token when it is in memory, as after an earlier question about them")
    lines.add_row(
        f"{operators * reuse:.1f}x",
        f"= {operators:.1f}x from faster operators (ratio 1 against plain transformers) "
        f"x {reuse:.1f}x from stored KV ({fused.name} against ratio 1)",
    )
    return lines


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
