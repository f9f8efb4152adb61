"""Every rule against the default on the same questions: paired bootstrap, and a correction for many comparisons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.config import DEFAULT_SELECTOR

from .methods import FULL, Method

__all__ = ["against_default", "holm", "paired_p"]

MEASURES = ("kl", "gold_probability", "contains", "rouge_l")
# Fewer questions are resampled into so few different samples that every difference looks certain.
MIN_QUESTIONS = 10
# A p-value cannot be smaller than 2 / ROUNDS, and is multiplied by the number of comparisons.
ROUNDS = 20_000
_Array = NDArray[np.float64]


def paired_p(differences: _Array, seed: int = 0) -> _Array:
    """Return two-sided p-values of mean differences being zero, by resampling questions.

    Parameters
    ----------
    differences : ndarray
        float64 ``[questions, comparisons]``, one rule minus the other on the same question.
    seed : int

    Returns
    -------
    ndarray
        float64 ``[comparisons]``: twice the smaller share of resampled means on either side of zero, at most 1.
    """
    count = len(differences)
    weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), ROUNDS).astype(np.float64)
    means = weights @ differences / count
    sides = np.minimum((means <= 0).sum(0), (means >= 0).sum(0))
    p: _Array = np.minimum(1.0, 2 * (1 + sides) / (1 + ROUNDS))
    return p


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values (1979): below 0.05, no more than 5% of such tables hold a single false one."""
    order = np.argsort(p_values, kind="stable")
    adjusted, highest = [1.0] * len(p_values), 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[place]))
        adjusted[place] = highest
    return adjusted


def against_default(columns: Mapping[Method, Sequence[Mapping[str, Any]]]) -> dict[Method, dict[str, Any]]:
    """Compare every rule with the default at the same preprocessing and ratio.

    All comparisons of one measure are one family for Holm's correction.

    Parameters
    ----------
    columns : mapping of Method to sequence of mapping
        Records of each method, one a question, in the same order.

    Returns
    -------
    dict of Method to dict
        By measure: ``difference`` of the means (the rule's minus the default's), ``p`` and ``p_holm``. Methods without
        a default beside them are left out, and all of them where there are fewer than ten questions.
    """
    default = {method: Method(DEFAULT_SELECTOR, method.preprocessing, method.ratio) for method in columns}
    rules = [m for m in columns if m not in (FULL, default[m]) and default[m] in columns]
    if not rules or len(columns[rules[0]]) < MIN_QUESTIONS:
        return {}
    found: dict[Method, dict[str, Any]] = {rule: {} for rule in rules}
    for measure in MEASURES:
        if any(record.get(measure) is None for records in columns.values() for record in records):
            continue
        values = {m: np.array([float(r[measure]) for r in records]) for m, records in columns.items()}
        differences = np.stack([values[rule] - values[default[rule]] for rule in rules], axis=1)
        p_values = paired_p(differences).tolist()
        for place, (rule, adjusted) in enumerate(zip(rules, holm(p_values), strict=True)):
            mean = float(differences[:, place].mean())
            found[rule][measure] = {"difference": mean, "p": p_values[place], "p_holm": adjusted}
    return found
