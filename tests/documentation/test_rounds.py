"""The estimate of an adaptive round is fitted to the committed rounds, and docs/experiments.md says how well."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from evaluation.questions import is_held_back
from evaluation.summary import rank_correlation
from numpy.typing import NDArray

from fused_kv_llm.config import EngineConfig
from fused_kv_llm.online import adaptive
from fused_kv_llm.online.draft import DRAFT_TOKENS

from .records import prose, records_of, table

PAGE = "docs/experiments.md"
ROUNDS = (0.0, *adaptive.round_ratios(EngineConfig().adaptive_cap))
BEFORE = (0.0, 0.05, 0.15, 0.3, 0.5)
Floats = NDArray[np.float64]


def prompts() -> list[dict[str, Any]]:
    """Return every prompt's set and wording, its question, and what its rounds were, by ratio."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for of, rows in records_of("adaptive_rounds_cpu.records.jsonl").items():
        for row in rows:
            new = {"of": of, "question": row["question"], "rounds": {}}
            found.setdefault((of, row["question"]), new)["rounds"][row["ratio"]] = row
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


def test_the_page_about_ratios() -> None:
    text = prose("docs/ratio.md")
    first, *some, last = (f"{100 * ratio:.0f}" for ratio in adaptive.round_ratios(EngineConfig().adaptive_cap))
    assert f"{first} % of the chunks' tokens, and where that is not enough {', '.join(some)} and {last} % (" in text
    assert f"`adaptive_cap`, {100 * adaptive._RATIOS[-1]:.0f} %, too; the estimate was fitted up to {last} %)" in text
    words = {7: "seven", 8: "eight"}
    assert f"{words[DRAFT_TOKENS]} tokens, also where fewer are asked for, or to its end" in text
    assert f"{words[DRAFT_TOKENS - 1]} forwards of one token at first" in text


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


def cross_fitted(of: list[dict[str, Any]], ratios: tuple[float, ...]) -> Floats:
    """Return the estimates ``[prompts, rounds]``, each fitted to nine tenths of the questions."""
    known = seen(of, ratios, DRAFT_TOKENS)
    moved, entropy, _ = known
    questions = list(dict.fromkeys(prompt["question"] for prompt in of))
    fold = np.array([questions.index(prompt["question"]) % 10 for prompt in of])
    expected = np.zeros_like(moved)
    for number in range(10):
        (c, d, a, b), _ = fitted(ratios, *(one[fold != number] for one in known))
        mine = fold == number
        open_ = c * np.exp(-d * np.array(ratios[1:])) * moved[mine] ** a * entropy[mine] ** b
        expected[mine] = np.maximum(open_, moved[mine] / 10)
    return expected


def earlier(of: list[dict[str, Any]], ratios: tuple[float, ...], positions: int) -> Floats:
    """Return the estimates of the version before, fitted to 72 prompts."""
    moved, entropy, _ = seen(of, ratios, positions)
    return np.maximum(0.039 * np.exp(-2.2 * np.array(ratios[1:])) * moved**0.36 * entropy**0.83, moved / 10)


def gains(of: list[dict[str, Any]], ratios: tuple[float, ...], expected: Floats) -> list[float]:
    """Return how much lower the KL is than that of fixed ratios, at a mean of 15 %: mean, worst tenth and p95."""
    kl, steps = seen(of, ratios, DRAFT_TOKENS)[2], np.array(ratios[1:])
    low, high = 1e-6, 2.0
    for _ in range(40):
        target = (low * high) ** 0.5
        last = np.where(expected <= target, np.arange(len(steps)), len(steps) - 1).min(1)
        low, high = (target, high) if steps[last].mean() > 0.15 else (low, target)
    left, share = kl[np.arange(len(of)), last], steps[last].mean()
    fixed = {ratio: np.array([prompt["rounds"][ratio]["kl"] for prompt in of]) for ratio in of[0]["rounds"]}
    return [
        100 * (1 - measure(left) / float(np.interp(share, list(fixed), [measure(one) for one in fixed.values()])))
        for measure in (np.mean, worst_tenth, p95)
    ]


def test_what_the_default_target_recomputes() -> None:
    target, shares = EngineConfig().adaptive_target, []
    for frame in ("short", "plain"):
        of = [prompt for prompt in prompts() if prompt["of"].endswith(frame)]
        moved, entropy, _ = seen(of, ROUNDS, DRAFT_TOKENS)
        last = [
            next((ratio for ratio, *known in zip(ROUNDS[1:], *pair, strict=True)
                  if adaptive.expected_after(ratio, *known) <= target), ROUNDS[-1])
            for pair in zip(moved, entropy, strict=True)
        ]  # fmt: skip
        shares.append(f"{100 * np.mean(last):.0f} %")
    text = prose("docs/quality.md")
    assert "of which the default target recomputes {} in `short` and {} in `plain`.".format(*shares) in text


def worst_tenth(kl: Floats) -> float:
    return float(np.sort(kl)[-max(1, len(kl) // 10) :].mean())


def p95(kl: Floats) -> float:
    return float(np.quantile(kl, 0.95))


def test_rounds_and_drafts() -> None:
    of = prompts()
    ways = {
        "six positions, 0.05, 0.15, 0.3, 0.5, the estimate before": (BEFORE, earlier(of, BEFORE, 6)),
        "eight, the same rounds and estimate": (BEFORE, earlier(of, BEFORE, 8)),
        "eight, the same rounds, fitted": (BEFORE, cross_fitted(of, BEFORE)),
        "eight, 0.05, 0.1, 0.2, 0.3, 0.5, fitted": (ROUNDS, cross_fitted(of, ROUNDS)),
    }
    want = []
    for label, (ratios, expected) in ways.items():
        cells = []
        for frame in ("short", "plain"):
            mine = [number for number, prompt in enumerate(of) if prompt["of"].endswith(frame)]
            cells += [f"{gain:.0f} %" for gain in gains([of[number] for number in mine], ratios, expected[mine])]
        want.append([label, *cells])
    assert table(PAGE, "adaptive, simulated") == want
    text = prose(PAGE)
    sets = [sum(prompt["of"].startswith(name) for prompt in of) // 2 for name in ("musique", "hotpotqa", "squad")]
    assert "{} questions of musique_train100, {} of hotpotqa_train100 and {} of squad10".format(*sets) in text
    assert not any(is_held_back(prompt["question"]) for prompt in of)
    asked = {row["question"] for rows in records_of("adaptive_eight_bit_cpu.records.jsonl").values() for row in rows}
    assert asked.isdisjoint(prompt["question"] for prompt in of)
    before, _, rounds_before, now = ways.values()
    told = [more(of, now, before), more(of, now, rounds_before)]
    assert "is {}, {} and {} points".format(*told[0]) in text
    assert "are worth {}, {} and {}:".format(*told[1]) in text


def more(of: list[dict[str, Any]], one: tuple[Any, Floats], other: tuple[Any, Floats]) -> list[str]:
    """Return by how many points one way gains more, both wordings, with 95 % intervals over the questions."""
    questions = list(dict.fromkeys(prompt["question"] for prompt in of))
    of_question = [[n for n, prompt in enumerate(of) if prompt["question"] == name] for name in questions]
    draws = [np.arange(len(of)), *(np.concatenate([of_question[n] for n in drawn]) for drawn in
             np.random.default_rng(0).integers(len(questions), size=(300, len(questions))))]  # fmt: skip
    differences = np.array([
        np.subtract(*(gains([of[n] for n in drawn], ratios, expected[drawn]) for ratios, expected in (one, other)))
        for drawn in draws
    ])  # fmt: skip
    low, high = np.quantile(differences[1:], (0.025, 0.975), axis=0)
    return [f"{d:.0f} ({lo:.0f} to {hi:.0f})" for d, lo, hi in zip(differences[0], low, high, strict=True)]
