"""What a calibration found, as a table and as a picture: agreement over time, with intervals."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from fused_kv_llm.errors import MissingExtraError

if TYPE_CHECKING:
    from fused_kv_llm.tuning import CalibrationResult

__all__ = ["calibration_table", "draw_calibration"]


def calibration_table(result: CalibrationResult) -> Table:
    """Return a row for every selector and ratio, the chosen one in bold."""
    table = Table(title="Agreement with full prefill", title_justify="left")
    for column in ("selector", "ratio", "agreement", "at least", "first token", "x sooner"):
        table.add_column(column, justify="left" if column == "selector" else "right")
    for point in result.points:
        chosen = (point.selector, point.ratio) == (result.chosen.selector, result.chosen.recompute_ratio)
        table.add_row(
            point.selector,
            f"{point.ratio:g}",
            f"{point.agreement:.1%}",
            f"{point.interval(result.choice.level)[0]:.1%}",
            f"{point.median_ttft_s:.2f} s",
            f"{result.full_ttft_s / point.median_ttft_s:.1f}",
            style="bold" if chosen else None,
        )
    return table


def draw_calibration(result: CalibrationResult, path: Path) -> None:
    """Draw every ratio's agreement over its time to the first token, with its interval.

    Parameters
    ----------
    result : CalibrationResult
    path : Path
        The picture; its ending says of which kind.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise MissingExtraError("matplotlib", "demo") from error
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    drawn: Any = axes
    for name in dict.fromkeys(point.selector for point in result.points):
        points = [point for point in result.points if point.selector == name]
        seconds, means = [p.median_ttft_s for p in points], [p.agreement for p in points]
        intervals = [p.interval(result.choice.level) for p in points]
        below = [mean - low for mean, (low, _) in zip(means, intervals, strict=True)]
        above = [high - mean for mean, (_, high) in zip(means, intervals, strict=True)]
        drawn.errorbar(seconds, means, yerr=(below, above), marker="o", capsize=3, label=name)
        for point in points:
            drawn.annotate(f"{point.ratio:g}", (point.median_ttft_s, point.agreement), fontsize=8, xytext=(4, -10),
                           textcoords="offset points")  # fmt: skip
    drawn.axhline(result.chosen.target_agreement, color="grey", linestyle="--", linewidth=1, label="target")
    drawn.scatter([result.full_ttft_s], [1.0], marker="*", s=120, color="black", label="full prefill")
    drawn.set_xlabel("time to first token (s)")
    drawn.set_ylabel("agreement with full prefill")
    drawn.set_title(
        f"Each point is a recomputation ratio; bounds hold with {result.choice.level:.1%} on either side", fontsize=10
    )
    drawn.grid(alpha=0.3)
    drawn.legend(fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)
