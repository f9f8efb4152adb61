"""Many settings in one table: every question counts once, with its mean over the settings it was asked in."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from .methods import FULL, Method
from .records import Records

__all__ = ["at_ratio", "pool"]


def at_ratio(records: Records, ratio: float, rules: Collection[str]) -> Records:
    """Return the records that a table of one ratio compares: full prefill, full reuse, and the rules at the ratio.

    Questions that not every one of its methods has answered are left out; none are left where no rule was asked.
    """
    chosen = {pair: record for pair, record in records.items() if _belongs(pair[1], ratio, rules)}
    keys = {key for _, key in chosen}
    if not any(Method.from_key(key).ratio == ratio for key in keys):
        return {}
    complete = {question for question, _ in chosen if all((question, key) in chosen for key in keys)}
    return {pair: record for pair, record in chosen.items() if pair[0] in complete}


def _belongs(key: str, ratio: float, rules: Collection[str]) -> bool:
    method = Method.from_key(key)
    return method == FULL or method.ratio == 0.0 or (method.ratio == ratio and method.selector in rules)


def pool(settings: Iterable[Records]) -> Records:
    """Return one record a question and method: the means of its numbers over the settings.

    Resampling questions then takes all prompts of a question together, which are not independent.

    Parameters
    ----------
    settings : iterable of dict
        Records of each, by :func:`at_ratio`. Methods that are not in all of them are left out.
    """
    parts = [part for part in settings if part]
    common = set.intersection(*({key for _, key in part} for part in parts)) if parts else set()
    gathered: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for part in parts:
        for pair, record in part.items():
            if pair[1] in common:
                gathered.setdefault(pair, []).append(record)
    return {pair: _mean(records) for pair, records in gathered.items()}


def _mean(records: list[Mapping[str, Any]]) -> dict[str, Any]:
    names = [name for name, value in records[0].items() if isinstance(value, (int, float))]
    kept = [name for name in names if all(record.get(name) is not None for record in records)]
    return {name: float(np.mean([record[name] for record in records])) for name in kept}
