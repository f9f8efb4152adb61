"""Quality against time to first token, one line a method: the papers' figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

_MARKERS = "osD^vP*X<>hdp"


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG with one panel a data set.

    Parameters
    ----------
    results : sequence of dict
        ``data`` and ``rows`` of each set.
    path : Path
    """
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, len(results), figsize=(6.2 * len(results), 5.0), squeeze=False)
    for panel, result in zip(panels[0], results, strict=True):
        _panel(panel, result)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=min(5, len(labels)), frameon=False, fontsize=8)
    rows_of_legend = -(-len(labels) // 5)
    figure.tight_layout(rect=(0, 0.03 + 0.045 * rows_of_legend, 1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _panel(panel: Any, result: dict[str, Any]) -> None:
    from matplotlib import colormaps

    rows = result["rows"]
    names = sorted({(row["selector"], row["preprocessing"]) for row in rows if row["selector"] != "full_prefill"})
    # Twenty colours, the strong ones first.
    wheel = colormaps["tab20"].colors[::2] + colormaps["tab20"].colors[1::2]
    colours = {name: wheel[index % 20] for index, name in enumerate(sorted({selector for selector, _ in names}))}
    for index, (selector, preprocessing) in enumerate(names):
        line = [r for r in rows if (r["selector"], r["preprocessing"]) == (selector, preprocessing)]
        points = sorted((r["ttft_median_s"], r["recovered"], *r["recovered_95"]) for r in line)
        low, high = [p[1] - p[2] for p in points], [p[3] - p[1] for p in points]
        panel.errorbar(
            [p[0] for p in points],
            [100 * p[1] for p in points],
            yerr=[[max(0.0, 100 * v) for v in low], [max(0.0, 100 * v) for v in high]],
            marker=_MARKERS[index % len(_MARKERS)],
            linestyle="-" if preprocessing == "none" else "--",
            color=colours[selector],
            linewidth=1.2,
            elinewidth=0.6,
            markersize=6,
            label=selector if preprocessing == "none" else f"{selector}, {preprocessing}",
        )
    full = next((r for r in rows if r["selector"] == "full_prefill"), None)
    if full is not None:
        panel.axhline(100, color="0.6", linewidth=0.8, linestyle=":")
        panel.plot([full["ttft_median_s"]], [100], marker="*", markersize=13, color="black", label="full prefill")
    panel.set_xlabel("median time to first token, s")
    panel.set_ylabel("KL of full reuse won back, %")
    panel.set_title(f"{result['data']}, {rows[0]['questions'] if rows else 0} questions")
    panel.grid(alpha=0.25)
