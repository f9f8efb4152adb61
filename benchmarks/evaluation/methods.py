"""What is compared: a selector, the preprocessing of the chunks it works on, and a recomputation ratio."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["BASELINE", "FULL", "Method", "methods_of"]


@dataclass(frozen=True, slots=True, order=True)
class Method:
    """One line of the table.

    Parameters
    ----------
    selector : str
        One of :func:`.rules.rule_of`, or ``"full_prefill"``.
    preprocessing : str
        The engine's option.
    ratio : float
        Recomputation ratio.
    """

    selector: str
    preprocessing: str
    ratio: float

    @property
    def key(self) -> str:
        """Name in records."""
        return f"{self.selector}/{self.preprocessing}/{self.ratio:g}"

    @classmethod
    def from_key(cls, key: str) -> Method:
        """Return the method of that name."""
        selector, preprocessing, ratio = key.rsplit("/", 2)
        return cls(selector, preprocessing, float(ratio))


FULL = Method("full_prefill", "none", 1.0)
BASELINE = Method("full_reuse", "none", 0.0)
"""Full reuse of chunks that were not preprocessed: what the recovered share is measured against."""


def methods_of(selectors: Sequence[str], preprocessings: Sequence[str], ratios: Sequence[float]) -> list[Method]:
    """Return every combination; at ratio 0 all selectors are the same and full reuse stands for them."""
    methods = [BASELINE]
    for preprocessing in preprocessings:
        methods.append(Method("full_reuse", preprocessing, 0.0))
        methods += [Method(name, preprocessing, ratio) for ratio in ratios if ratio > 0 for name in selectors]
    return list(dict.fromkeys(method for method in methods if method.selector != "full_reuse" or method.ratio == 0))
