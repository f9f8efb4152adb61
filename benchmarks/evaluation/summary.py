"""Means over questions, bootstrap intervals, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .comparison import against_default
from .methods import BASELINE, FULL, Method

__all__ = ["bootstrap", "geometric_mean_ratio", "markdown_table", "rank_correlation", "summarise"]

_MEANS = (
    "kl", "top1_agreement", "gold_probability", "ttft_s", "probe_s", "selection_bytes", "selection_share",
    "f1", "em", "contains", "answer_recall", "rouge_l", "support", "recall_10",
)  # fmt: skip
_WITH_INTERVAL = ("gold_probability", "contains", "rouge_l")
_ROUNDS = 2000
_LEAST = 1e-5
_Values = NDArray[np.float64]


def bootstrap(values: Sequence[float], baseline: Sequence[float], kind: str, seed: int = 0) -> list[float]:
    """Return the 95% interval over resampled questions, pairs kept together.

    Parameters
    ----------
    values, baseline : sequence of float
        One value a question each.
    kind : {"recovered", "difference", "mean"}
        ``1 - mean(values) / mean(baseline)``, ``mean(values - baseline)``, or ``mean(values)``.
    """
    ours, theirs = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(0, len(ours), (_ROUNDS, len(ours)))
    mine, base = ours[drawn].mean(1), theirs[drawn].mean(1)
    shares = {"recovered": 1 - mine / np.maximum(base, 1e-12), "difference": mine - base, "mean": mine}[kind]
    low, high = np.percentile(shares, [2.5, 97.5])
    return [float(low), float(high)]


def geometric_mean_ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the geometric mean of ``values / others``; less than 1e-5 counts as 1e-5, about what rounding does."""
    ratios = np.maximum(values, _LEAST) / np.maximum(others, _LEAST)
    return float(np.exp(np.log(ratios).mean()))


def rank_correlation(values: Sequence[float], others: Sequence[float]) -> float | None:
    """Return Spearman's correlation, equal values sharing their mean rank; None where one side does not vary."""
    ranks = [_ranks(np.asarray(part, dtype=np.float64)) for part in (values, others)]
    if any(np.ptp(part) == 0 for part in ranks):
        return None
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: _Values) -> _Values:
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    means: _Values = np.cumsum(counts) - (counts - 1) / 2
    return means[group]


def summarise(records: dict[tuple[str, str], dict[str, Any]], questions: Sequence[str]) -> list[dict[str, Any]]:
    """Return one row a method over the questions that every method has answered.

    ``recovered`` is the share of full reuse's KL (chunks without preprocessing) that a method wins back, of the sums
    over questions, in which a few bad ones count most; ``recovered_typical`` that of the geometric mean over questions;
    ``normalised_f1`` is FusionRAG eq. 11, 0 at full reuse and 1 at full prefill; ``expected_rank_correlation`` is
    Spearman's between the divergence that the report expects and the KL, where reports have one; ``against_default``
    compares with the default rule at the same preprocessing and ratio, see :func:`.comparison.against_default`.
    """
    keys = {method for _, method in records}
    complete = [q for q in questions if all((q, key) in records for key in keys)]
    if not complete:
        return []
    column = {key: [records[q, key] for q in complete] for key in keys}
    base, full = column[BASELINE.key], column[FULL.key]
    compared = against_default({Method.from_key(key): of_key for key, of_key in column.items()})
    rows = []
    for method in sorted((Method.from_key(key) for key in keys), key=lambda m: (m.preprocessing, m.ratio, m.selector)):
        mine = column[method.key]
        row: dict[str, Any] = {
            "selector": method.selector,
            "preprocessing": method.preprocessing,
            "ratio": method.ratio,
            "questions": len(complete),
        }
        for name in _MEANS:
            present = [float(r[name]) for r in mine if r.get(name) is not None]
            if present:
                row[name] = float(np.mean(present))
            if name in _WITH_INTERVAL and len(present) == len(mine):
                row[f"{name}_95"] = bootstrap(present, present, "mean")
        row["kl_p95"] = float(np.percentile(_of(mine, "kl"), 95))
        if all("expected_divergence" in r for r in mine):
            row["expected_rank_correlation"] = rank_correlation(_of(mine, "expected_divergence"), _of(mine, "kl"))
        # Question by question: one that was interrupted by whatever else ran would outweigh all others in a mean.
        row["probe_share"] = float(np.median([r["probe_s"] / r["ttft_s"] for r in mine]))
        row["ttft_median_s"] = float(np.median([r["ttft_s"] for r in mine]))
        row["recovered"] = 1 - row["kl"] / max(float(np.mean([r["kl"] for r in base])), 1e-12)
        row["recovered_95"] = bootstrap(_of(mine, "kl"), _of(base, "kl"), "recovered")
        row["recovered_typical"] = 1 - geometric_mean_ratio(_of(mine, "kl"), _of(base, "kl"))
        if "f1" in row:
            row.update(_f1_comparison(mine, base, full))
        if method in compared:
            row["against_default"] = compared[method]
            row["kl_p_holm"] = compared[method]["kl"]["p_holm"]
        rows.append(row)
    return rows


def _of(records: list[dict[str, Any]], name: str) -> list[float]:
    return [float(record[name]) for record in records]


def _f1_comparison(mine: list[Any], base: list[Any], full: list[Any]) -> dict[str, Any]:
    ours, low, high = (_of(part, "f1") for part in (mine, base, full))
    gap = float(np.mean(high) - np.mean(low))
    return {
        "f1_95": bootstrap(ours, ours, "mean"),
        "f1_minus_full": float(np.mean(ours) - np.mean(high)),
        "f1_minus_full_95": bootstrap(ours, high, "difference"),
        "normalised_f1": float(np.mean(ours) - np.mean(low)) / gap if abs(gap) > 1e-9 else None,
    }


_COLUMNS = {
    "selector": ("selector", "{}"),
    "preprocessing": ("preprocessing", "{}"),
    "ratio": ("ratio", "{:g}"),
    "kl": ("KL", "{:.4f}"),
    "kl_p95": ("KL, p95", "{:.3f}"),
    "recovered": ("recovered", "{:.1%}"),
    "recovered_95": ("95 %", "{0[0]:.1%} to {0[1]:.1%}"),
    "recovered_typical": ("typical", "{:.1%}"),
    "kl_p_holm": ("p, KL is the default's", "{:.3f}"),
    "top1_agreement": ("top-1", "{:.1%}"),
    "gold_probability": ("P(gold)", "{:.4f}"),
    "gold_probability_95": ("95 %", "{0[0]:.4f} to {0[1]:.4f}"),
    "f1": ("F1", "{:.3f}"),
    "f1_minus_full_95": ("F1 - full, 95 %", "{0[0]:+.3f} to {0[1]:+.3f}"),
    "normalised_f1": ("norm. F1", "{:.2f}"),
    "em": ("EM", "{:.3f}"),
    "contains": ("contained", "{:.3f}"),
    "contains_95": ("95 %", "{0[0]:.3f} to {0[1]:.3f}"),
    "answer_recall": ("answers found", "{:.3f}"),
    "rouge_l": ("ROUGE-L to full", "{:.3f}"),
    "rouge_l_95": ("95 %", "{0[0]:.3f} to {0[1]:.3f}"),
    "support": ("support", "{:.3f}"),
    "expected_rank_correlation": ("expected KL, rank corr.", "{:.2f}"),
    "recall_10": ("recall@10%", "{:.1%}"),
    "ttft_median_s": ("TTFT s", "{:.3f}"),
    "probe_share": ("probe of TTFT", "{:.1%}"),
    "selection_share": ("KV read first", "{:.1%}"),
    "selection_bytes": ("bytes read first", "{:,.0f}"),
}


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows as a markdown table; columns without a value are left out."""
    names = [name for name in _COLUMNS if any(row.get(name) is not None for row in rows)]
    lines = ["| " + " | ".join(_COLUMNS[name][0] for name in names) + " |"]
    lines.append("|" + "|".join("---" if name in ("selector", "preprocessing") else "--:" for name in names) + "|")
    for row in rows:
        cells = [_COLUMNS[name][1].format(row[name]) if row.get(name) is not None else "" for name in names]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
