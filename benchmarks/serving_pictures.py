"""What `serving.py` measured, as tables and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from rich.console import Console
from rich.table import Table

mpl.use("Agg")
import matplotlib.pyplot as plt

__all__ = ["draw", "print_tables"]

_COLOURS = {"fused": "#1b9e77", "plain": "black", "generate_batch": "#7570b3", "vllm": "#d95f02"}
_NAMES = {
    "fused": "this engine",
    "plain": "transformers generate",
    "generate_batch": "transformers generate_batch",
    "vllm": "vLLM (CPU)",
}


def print_tables(found: dict[str, Any], title: str) -> None:
    """Print one line a load, and one line a system for the gaps beside a long prompt."""
    table = Table(title=title)
    for column in ("system", "load", "tokens/s", "requests/s", "TTFT p50", "p95", "p99", "gap p50", "p99", "GB"):
        table.add_column(column, justify="left" if column in ("system", "load") else "right")
    for row in found["rows"]:
        load = f"{row['rate_per_s']:g} a second" if row["load"] == "open" else f"{row['at_once']} at once"
        times = [f"{row[name]:.3f}" for name in ("ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "gap_p50_s", "gap_p99_s")]
        rates = [f"{row['tokens_per_s']:.1f}", f"{row['requests_per_s']:.2f}"]
        name = f"{load}, short" if row["load"] == "short" else load
        table.add_row(row["system"], name, *rates, *times, f"{row['peak_rss_bytes'] / 1e9:.1f}")
    Console(width=120).print(table)
    table = Table(title="Gaps of seven running answers, and beside a long prompt")
    for column in ("system", "p50", "p99", "longest", "beside: p50", "p99", "longest", "its TTFT", "GB", "beside"):
        table.add_column(column, justify="left" if column == "system" else "right")
    for system, gap in found["gaps"].items():
        sides = (gap["alone"], gap["beside"])
        times = [f"{side[name]:.3f}" for side in sides for name in ("gap_p50_s", "gap_p99_s", "gap_max_s")]
        memory = [f"{side['peak_rss_bytes'] / 1e9:.1f}" for side in sides]
        table.add_row(system, *times, f"{gap['long_prompt_ttft_s']:.1f}", *memory)
    Console(width=120).print(table)


def draw(found: dict[str, Any], path: Path, title: str) -> None:
    """Draw throughput and time to first token over the number of users, and the gaps beside a long prompt."""
    figure, panels = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    _over_users(panels[0], found["rows"], "tokens_per_s", "answer tokens a second")
    _over_users(panels[1], found["rows"], "ttft_p95_s", "time to first token, 95th percentile (s)")
    panels[0].legend(fontsize=8)
    _gaps(panels[2], found["gaps"])
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _over_users(axes: Axes, rows: list[dict[str, Any]], name: str, label: str) -> None:
    closed = [row for row in rows if row["load"] == "closed"]
    for system, colour in _COLOURS.items():
        points = [(row["at_once"], row[name]) for row in closed if row["system"] == system]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=_NAMES[system])
    axes.set_xticks(sorted({row["at_once"] for row in closed}))
    axes.set_xlabel("users at once")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _gaps(axes: Axes, gaps: dict[str, Any]) -> None:
    found = [gap[side]["gap_p99_s"] for gap in gaps.values() for side in ("alone", "beside")]
    for number, (system, gap) in enumerate(gaps.items()):
        for offset, side, opacity in ((-0.2, "alone", 0.45), (0.2, "beside", 1.0)):
            height = gap[side]["gap_p99_s"]
            axes.bar(number + offset, height, 0.38, color=_COLOURS[system], alpha=opacity)
            axes.text(number + offset, height, f"{height:.2g}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(gaps)), [_NAMES[system] for system in gaps])
    # A system that lets a prompt hold up its answers is far off.
    axes.set_yscale("log" if max(found) > 10 * min(found) else "linear")
    axes.margins(y=0.15)
    axes.set_ylabel("gap between tokens, 99th percentile (s)")
    axes.set_title("seven answers; darker: a long prompt begins", fontsize=9)
    axes.grid(alpha=0.3, axis="y")
