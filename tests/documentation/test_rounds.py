"""The estimate of an adaptive round is fitted to the committed rounds, and docs/experiments.md says how well."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from evaluation.summary import rank_correlation
from numpy.typing import NDArray

from fused_kv_llm.online import adaptive
from fused_kv_llm.online.draft import DRAFT_TOKENS

from .records import RESULTS, prose, table

PAGE = "docs/experiments.md"
ROUNDS = (0.0, *adaptive.round_ratios(0.5))
BEFORE = (0.0, 0.05, 0.15, 0.3, 0.5)
Floats = NDArray[np.float64]


def prompts() -> list[dict[str, dict[float, Any]]]:
    """Return every prompt's set and wording, and what its rounds were, by ratio."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for line in (RESULTS / "adaptive_rounds_cpu.records.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = found.setdefault((row["settings"], row["question"]), {"of": row["settings"], "rounds": {}})
        prompt["rounds"][row["ratio"]] = row
    return list(found.values())


def seen(of: list[dict[str, Any]], ratios: tuple[float, ...], positions: int) -> tuple[Floats, Floats, Floats]:
    """Return movement, entropy and true KL ``[prompts, rounds]`` of the rounds behind the first."""
    moved, entropy, kl = [], [], []
    for prompt in of:
        rounds, key = prompt["rounds"], str(positions)
        steps = list(pairwise(ratios))
        moved.append([rounds[now]["moved"][f"{before:g}"][key] for before, now in steps])
        entropy.append([max(rounds[before]["entropy"][key], rounds[now]["entropy"][key]) for before, now in steps])
        kl.append([rounds[now]["kl"] for _, now in steps])
    return np.array(moved), np.array(entropy), np.array(kl)


def fitted(ratios: tuple[float, ...], moved: Floats, entropy: Floats, kl: Floats) -> tuple[Floats, float]:
    """Return ``c, d, a, b`` by least squares of logarithms, and R squared."""
    ratio = np.broadcast_to(ratios[1:], kl.shape)
    known = np.stack(
        [np.ones(kl.size), -ratio.ravel(), *(np.log(np.maximum(one, 1e-6)).ravel() for one in (moved, entropy))], 1
    )
    wanted = np.log(np.maximum(kl, 1e-5)).ravel()
    numbers = np.linalg.lstsq(known, wanted, rcond=None)[0]
    left = ((wanted - known @ numbers) ** 2).sum() / ((wanted - wanted.mean()) ** 2).sum()
    return np.array([np.exp(numbers[0]), *numbers[1:]]), float(1 - left)


def test_the_estimate_is_what_the_rounds_give() -> None:
    numbers, _ = fitted(ROUNDS, *seen(prompts(), ROUNDS, DRAFT_TOKENS))
    told = (adaptive._SCALE, adaptive._DECAY, adaptive._MOVED, adaptive._OPEN)
    assert numbers == pytest.approx(np.array(told), rel=0.03)


def test_positions_of_the_draft() -> None:
    of, want = prompts(), []
    for positions in (4, 6, 8, 11, 14):
        moved, entropy, kl = seen(of, ROUNDS, positions)
        (c, d, a, b), explained = fitted(ROUNDS, moved, entropy, kl)
        ranks = [
            f"{rank_correlation(c * np.exp(-d * ratio) * moved[:, step] ** a * entropy[:, step] ** b, kl[:, step]):.2f}"
            for step, ratio in enumerate(ROUNDS[1:5])
        ]
        want.append([str(positions), *ranks, f"{explained:.2f}"])
    assert table(PAGE, "positions") == want


def gains(
    of: list[dict[str, Any]], ratios: tuple[float, ...], positions: int, estimate: Callable[..., float]
) -> list[str]:
    """Return how much lower the KL is than that of fixed ratios, at a mean of 15 %: mean, worst tenth and p95."""
    moved, entropy, kl = seen(of, ratios, positions)
    expected = np.array([
        [estimate(ratio, *pair) for ratio, *pair in zip(ratios[1:], *rows, strict=True)]
        for rows in zip(moved, entropy, strict=True)
    ])  # fmt: skip
    low, high = 1e-6, 2.0
    for _ in range(60):
        target = (low * high) ** 0.5
        last = np.where(expected <= target, np.arange(len(ratios) - 1), len(ratios) - 2).min(1)
        share = np.array(ratios[1:])[last].mean()
        low, high = (target, high) if share > 0.15 else (low, target)
    left = kl[np.arange(len(of)), last]
    fixed = {ratio: np.array([prompt["rounds"][ratio]["kl"] for prompt in of]) for ratio in of[0]["rounds"]}
    cells = []
    for measure in (np.mean, worst_tenth, p95):
        same = np.interp(share, list(fixed), [measure(one) for one in fixed.values()])
        cells.append(f"{100 * (1 - measure(left) / same):.0f} %")
    return cells


def worst_tenth(kl: Floats) -> float:
    return float(np.sort(kl)[-max(1, len(kl) // 10) :].mean())


def p95(kl: Floats) -> float:
    return float(np.quantile(kl, 0.95))


def earlier(ratio: float, moved: float, entropy: float) -> float:
    """Return the estimate of the version before, fitted to 72 prompts."""
    return float(max(0.039 * np.exp(-2.2 * ratio) * moved**0.36 * entropy**0.83, moved / 10))


def test_rounds_and_drafts() -> None:
    of = prompts()
    ways = (
        ("six positions, 0.05, 0.15, 0.3, 0.5, the estimate before", BEFORE, 6, earlier),
        ("eight, the same rounds and estimate", BEFORE, 8, earlier),
        ("eight, 0.05, 0.1, 0.2, 0.3, 0.5, the same estimate", ROUNDS, 8, earlier),
        ("eight, these rounds, the estimate fitted to these prompts", ROUNDS, 8, adaptive.expected_after),
    )
    want = [
        [label, *(cell for frame in ("short", "plain")
                  for cell in gains([one for one in of if one["of"].endswith(frame)], *how))]
        for label, *how in ways
    ]  # fmt: skip
    assert table(PAGE, "adaptive, simulated") == want
    sets = [sum(one["of"].startswith(name) for one in of) // 2 for name in ("musique", "hotpotqa", "squad")]
    assert "{} questions of musique_train100, {} of hotpotqa_train100 and {} of squad10".format(*sets) in prose(PAGE)
