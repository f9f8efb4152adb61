"""Draws the diagrams of the documentation: python docs/pictures/draw.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).parent
INK, GREY, GREEN, ORANGE, BLUE, PALE = "#1d2733", "#9aa3ad", "#3c9d5d", "#e0912f", "#4a86d8", "#eef1f4"


def box(axes: Any, x: float, y: float, width: float, text: str, colour: str = PALE, ink: str = INK) -> None:
    """Draw a rounded box with a label."""
    shape = FancyBboxPatch((x, y), width, 0.62, boxstyle="round,pad=0.02,rounding_size=0.08", fc=colour, ec="none")
    axes.add_patch(shape)
    axes.text(x + width / 2, y + 0.31, text, ha="center", va="center", color=ink, fontsize=10)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Draw an arrow."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=12, color=INK, lw=1.2))


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """Return a figure of this size in inches, and axes in the same units."""
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(0, height))
    axes.set_aspect("equal")
    axes.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    return figure, axes


def ingestion() -> None:
    """What happens to a chunk once."""
    figure, axes = canvas(11.4, 2.6)
    axes.text(0.1, 2.3, "Once per chunk, at ingestion", fontsize=11, weight="bold", color=INK)
    header, similar, chunk = ("chat header", 1.3, GREY), ("similar chunk", 1.4, PALE), ("the chunk", 1.3, GREEN)
    rows = (
        (1.35, (header, chunk), "its keys and values: one file"),
        (0.35, (header, similar, similar, chunk, similar), "what two prompts change: 8 bits"),
    )
    for y, boxes, result in rows:
        x = 0.1
        for text, width, colour in boxes:
            box(axes, x, y, width, text, colour, INK if colour == PALE else "white")
            x += width + 0.08
        arrow(axes, (x, y + 0.31), (8.0, y + 0.31))
        box(axes, 8.1, y, 3.2, result)
    figure.savefig(HERE / "ingestion.svg")
    plt.close(figure)


def request() -> None:
    """What happens to a prompt."""
    figure, axes = canvas(10, 4.9)
    axes.text(0.1, 4.6, "At every request", fontsize=11, weight="bold", color=INK)
    x = 0.1
    for text, width, colour in (
        ("header", 1.1, GREY),
        ("chunk 7", 2.1, GREEN),
        ("chunk 2", 2.1, GREEN),
        ("chunk 9", 2.1, GREEN),
        ("question", 1.9, BLUE),
    ):
        box(axes, x, 3.65, width, text, colour, "white")
        x += width + 0.08
    axes.text(
        0.1,
        3.25,
        "1  Stored chunks are found in the rendered prompt by their text.",
        fontsize=9.5,
    )
    axes.text(0.1, 2.85, "2  Their KV is loaded; keys are rotated to where the chunks stand now.", fontsize=9.5)
    axes.text(0.1, 2.45, "3  The question's attention scores every chunk token.", fontsize=9.5)
    axes.text(
        0.1,
        2.05,
        "4  The best 15 % are recomputed with the fresh text, in one pass, by true position:",
        fontsize=9.5,
    )
    x = 0.1
    axes.add_patch(plt.Rectangle((x, 1.2), 1.1, 0.5, color=GREY))
    x += 1.18
    chosen = {0: (0, 1, 9), 1: (0, 4, 5, 13), 2: (0, 8)}
    for chunk in range(3):
        for token in range(14):
            colour = ORANGE if token in chosen[chunk] else GREEN
            axes.add_patch(plt.Rectangle((x + token * 0.15, 1.2), 0.125, 0.5, color=colour))
        x += 2.18
    axes.add_patch(plt.Rectangle((x, 1.2), 1.9, 0.5, color=BLUE))
    for at, (colour, text) in enumerate(
        (
            (GREY, "exact KV at hand"),
            (GREEN, "stored KV reused"),
            (ORANGE, "recomputed"),
            (BLUE, "fresh text, computed"),
        )
    ):
        axes.add_patch(plt.Rectangle((0.1 + at * 2.3, 0.72), 0.2, 0.2, color=colour))
        axes.text(0.38 + at * 2.3, 0.82, text, fontsize=9.5, va="center", color=INK)
    axes.text(0.1, 0.3, "5  Decoding goes on from an ordinary transformers cache.", fontsize=9.5)
    figure.savefig(HERE / "request.svg")
    plt.close(figure)


if __name__ == "__main__":
    # Words as words, so that they can be searched and read aloud; the same file every time.
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fused-kv", "font.family": "sans-serif"})
    ingestion()
    request()
