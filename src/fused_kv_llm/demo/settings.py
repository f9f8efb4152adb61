"""What the demo runs, chosen by the measurement of ``benchmarks/demo_questions.py``."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEMO", "DemoSettings"]


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Settings of the demo.

    Parameters
    ----------
    passages : int
        Passages in a prompt.
    ratio : float
        Recomputation ratio.
    max_tokens : int
        Longest answer.
    stop : tuple of str
        An answer ends at the first of these strings.
    """

    passages: int
    ratio: float
    max_tokens: int
    stop: tuple[str, ...]


# An answer is its first clause: after it a model of 135M parameters goes on with whatever numbers are near.
DEMO = DemoSettings(passages=5, ratio=0.5, max_tokens=40, stop=(", ", ". ", "\n"))
