"""Figures in docs/experiments.md are those of the records."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from math import exp, log
from statistics import mean
from typing import Any

import pytest
from adaptive import summarise as summarise_ways
from evaluation.summary import summarise

from .records import (
    RESULTS,
    kl_over,
    kl_rows,
    prose,
    quality,
    ratio_cells,
    record,
    records_of,
    rows_of,
    second_passes,
    table,
    told_nearer,
    total,
    ways_of_recomputing,
    with_interval,
)

PAGE = "docs/experiments.md"


def _selector_rows() -> Iterator[list[str]]:
    sets = quality("quality_methods_cpu.json")
    keys = [key for key in next(iter(sets.values())) if key[2] == 0.15]
    for key in sorted(keys, key=lambda key: -mean(rows[key]["recovered"] for rows in sets.values())):
        shares = [rows[key]["recovered"] for rows in sets.values()]
        recall = mean(rows[key]["recall_10"] for rows in sets.values())
        yield [f"`{key[0]}`", *(f"{100 * share:.0f} %" for share in (*shares, mean(shares), recall))]


def test_all_selectors() -> None:
    head = " | ".join(["selector", *quality("quality_methods_cpu.json")])
    assert table(PAGE, head) == list(_selector_rows())


def test_the_default() -> None:
    want = []
    for name, rows in quality("quality_default_cpu.json").items():
        reused, fused = rows["full_reuse", "similar", 0.0], rows["sink_attention", "similar", 0.15]
        low, high = fused["f1_minus_full_95"]
        want.append([name, with_interval(reused), with_interval(fused), f"{100 * low:+.1f} to {100 * high:+.1f}"])
    assert table(PAGE, "set") == want


def test_shifts_from_prompts() -> None:
    assert table(PAGE, "wording and ratio, one grouping") == list(kl_rows("_one_grouping", "_contexts"))


def test_one_prompt_instead_of_two() -> None:
    methods = {"0": "full_reuse/similar/0", "0.15": "sink_attention/similar/0.15", "none": "full_reuse/none/0"}
    want = []
    for frame in ("plain", "short"):
        both = [records_of(f"quality_ten_{frame}{kind}_cpu.records.jsonl") for kind in ("_one_prompt", "_one_grouping")]
        for name, *rows in zip(quality(f"quality_ten_{frame}_cpu.json"), *(of.values() for of in both), strict=True):
            shares = [
                {
                    ratio: 100 - 100 * total(records, methods[ratio]) / total(records, methods["none"])
                    for ratio in ("0", "0.15")
                }
                for records in rows
            ]
            cells = [f"{name}, `{frame}`"]
            for ratio in ("0", "0.15"):
                one, two = (share[ratio] for share in shares)
                cells += [f"{one:.0f} %", f"{two - one:.1f}"]
            want.append(cells)
    assert table(PAGE, "set and wording, one prompt") == want


def test_two_divisions_of_groups() -> None:
    want = list(kl_rows("_two_divisions", "_one_grouping"))
    assert table(PAGE, "wording and ratio, two divisions") == want


def test_a_stronger_pull_and_a_stored_first_chunk() -> None:
    assert table(PAGE, "wording and ratio, now") == list(kl_rows("_in_full", "_two_divisions"))
    want = list(kl_rows("_float32_in_full", "_float32_two_divisions"))
    assert table(PAGE, "wording and ratio, now, float32") == want


def test_four_prompts_instead_of_two() -> None:
    kinds = "_float32_two_divisions", "_float32_four_prompts"
    want = []
    for frame in ("plain", "short"):
        both = [records_of(f"quality_ten_{frame}{kind}_cpu.records.jsonl").values() for kind in kinds]
        for name, *of_set in zip(quality("quality_ten_plain_cpu.json"), *both, strict=True):
            rows = [rows_of(records) for records in of_set]
            ways = ("full_reuse", "similar", 0.0), ("sink_attention", "similar", 0.15)
            shares = [f"{100 * of[way]['recovered']:.0f} %" for of in rows for way in ways]
            want.append([f"{name}, `{frame}`", *shares])
    assert table(PAGE, "set and wording, float32 then") == want
    assert table(PAGE, "wording and ratio, four prompts") == list(kl_rows(*reversed(kinds)))


def _beside(*kinds: str) -> tuple[list[list[str]], dict[float, list[float]]]:
    """Return a table of what the first kind of records recovers and the second more; and that by ratio, in points."""
    methods = ("full_reuse", "similar", 0.0), ("sink_attention", "similar", 0.15)
    rows, lost = [], {ratio: list[float]() for *_, ratio in methods}
    for frame in ("plain", "short"):
        both = (
            [rows_of(of) for of in records_of(f"quality_ten_{frame}{kind}_cpu.records.jsonl").values()]
            for kind in kinds
        )
        for name, *of_set in zip(quality("quality_ten_plain_cpu.json"), *both, strict=True):
            cells = [f"{name}, `{frame}`"]
            for method in methods:
                share, other = (100 * of[method]["recovered"] for of in of_set)
                cells += [f"{share:.1f} %", f"{other - share:.1f}"]
                lost[method[2]].append(other - share)
            rows.append(cells)
    return rows, lost


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_runs_of_one_prompt(dtype: str) -> None:
    kinds = ("_float32_one_prompt", "_float32_in_full") if dtype == "float32" else ("_runs", "_in_full")
    want, lost = _beside(*kinds)
    assert table(PAGE, f"set and wording, one prompt in runs, {dtype}") == want
    text = prose(PAGE)
    assert f"{mean(lost[0.15]):.1f} points less on average in {dtype}" in text


@pytest.mark.parametrize(
    ("dtype", "kinds", "questions"),
    [("float32", ("_float32_again", "_float32_linears"), 20), ("bfloat16", ("_again", "_linears"), 40)],
)
def test_one_prompt_and_for_some_a_second(dtype: str, kinds: tuple[str, str], questions: int) -> None:
    """On the questions that were asked."""
    want, lost = [], []
    for frame in ("plain", "short"):
        again, two = (records_of(f"quality_ten_{frame}{kind}_cpu.records.jsonl") for kind in kinds)
        for name, one, of_all in zip(quality("quality_ten_plain_cpu.json"), again.values(), two.values(), strict=True):
            asked = {row["question"] for row in one}
            other = [row for row in of_all if row["question"] in asked]
            assert len(asked) == questions
            whole = total(other, "full_reuse/none/0", questions)
            cells = [f"{name}, `{frame}`"]
            for method in ("full_reuse/similar/0", "sink_attention/similar/0.15"):
                share, of_two = (100 - 100 * total(rows, method, questions) / whole for rows in (one, other))
                cells += [f"{share:.1f} %", f"{of_two - share:.1f}"]
            lost.append(of_two - share)
            want.append(cells)
    assert table(PAGE, f"set and wording, one prompt and for some a second, {dtype}") == want
    text = prose(PAGE)
    way = "less" if mean(lost) > 0 else "more"
    assert f"{abs(mean(lost)):.1f} points {way} at 0.15 on average in {dtype}" in text


def test_half_of_the_chunks_again() -> None:
    kinds = "_half_again", "_gated"
    want, lost = _beside(*kinds)
    assert table(PAGE, "set and wording, half of the chunks again") == want
    assert table(PAGE, "wording and ratio, half of the chunks again") == list(kl_rows(*kinds))
    text = prose(PAGE)
    zero, at = lost[0.0], lost[0.15]
    assert f"{mean(at):.1f} points less at 0.15 on average, {max(at):.1f} in the set that loses most" in text
    assert f"{mean(zero):.1f} and {max(zero):.1f} points less at 0" in text


def test_five_eighths_of_the_chunks_again() -> None:
    single = list(kl_rows("_float32_five_eighths", "_float32_earlier_layers", questions=36))
    assert table(PAGE, "wording and ratio, five eighths again, float32") == single
    kinds = "_five_eighths", "_gated"
    assert table(PAGE, "wording and ratio, five eighths again, bfloat16") == list(kl_rows(*kinds))
    want, lost = _beside(*kinds)
    assert table(PAGE, "set and wording, five eighths again, bfloat16") == want
    text = prose(PAGE)
    zero, at = (f"{mean(points):.1f} points" for points in lost.values())
    assert f"In bfloat16 that is {at} less at 0.15 and {zero} less at 0 on average" in text
    some, whole = (second_passes(f"bfloat16_{way}", prompts=2) for way in ("five_eighths", "gated"))
    assert f"took {some[0]:.2f} to {some[-1]:.2f} times as long as the first with it in bfloat16 (three runs" in text
    assert f"and {whole[0]:.2f} to {whole[-1]:.2f} times in full" in text


def test_adaptive_against_fixed_ratios() -> None:
    rows = {(row["way"], row["along"]): row for row in record("adaptive_cpu.json")["rows"]}
    adaptive = rows["adaptive 0.01", "answer"]
    assert table(PAGE, "way, one grouping") == ways_of_recomputing("adaptive_cpu.json")
    assert f"answers is {100 * (1 - adaptive['p95'] / adaptive['fixed_p95']):.0f} % nearer" in prose(PAGE)
    assert rows["adaptive, all to 0.15", "answer"]["rank_correlation"] > 0.6


def test_adaptive_with_shifts_of_two_divisions() -> None:
    listed = record("adaptive_float32_cpu.json")["rows"]
    rows = {(row["way"], row["along"]): row for row in listed}
    assert {row["questions"] for row in listed} == {120}
    asked: dict[tuple[str, str], dict[str, Any]] = {}
    for line in (RESULTS / "adaptive_float32_cpu.records.jsonl").read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        asked.setdefault((one["settings"], one["question"]), {})[one["method"]] = one
    of_sets: dict[str, list[dict[str, Any]]] = {}
    for (settings, _), ways in asked.items():
        of_sets.setdefault(settings, []).append({way: ways[way] for way in dict.fromkeys(row["way"] for row in listed)})
    first = [ways for of_set in of_sets.values() for ways in of_set[:20]]
    assert table(PAGE, "way, two divisions") == ways_of_recomputing("adaptive_float32_cpu.json")
    text = prose(PAGE)
    assert f"p95 is {told_nearer(listed)} below" in text
    assert f"worst three, it was {told_nearer(summarise_ways(first))}" in text
    assert round(rows["adaptive 0.008", "answer"]["mean_share"], 2) == 0.15
    assert rows["adaptive, all to 0.15", "answer"]["rank_correlation"] > 0.6


def test_the_default_with_a_second_model() -> None:
    def chosen(rows: Any) -> list[dict[str, Any]]:
        return [rows["full_reuse", "similar", 0.0], rows["sink_attention", "similar", 0.15]]

    first = {tuple(one["question"] for one in records): records
             for records in records_of("quality_default_cpu.records.jsonl").values()}  # fmt: skip
    asked = [list(dict.fromkeys(one["question"] for one in records))
             for records in records_of("quality_gemma_cpu.records.jsonl").values()]  # fmt: skip
    want, counts = [], set()
    for (name, rows), questions in zip(quality("quality_gemma_cpu.json").items(), asked, strict=True):
        counts |= {row["questions"] for row in chosen(rows)} | {len(questions)}
        (records,) = (found for known, found in first.items() if set(questions) <= set(known))
        by_question = {(one["question"], one["method"]): one for one in records}
        other = {
            (row["selector"], row["preprocessing"], row["ratio"]): row for row in summarise(by_question, questions)
        }
        want.append([name, *map(with_interval, chosen(rows)), *map(with_interval, chosen(other))])
    assert table(PAGE, "set of Gemma") == want
    text = prose(PAGE)
    (count,) = counts
    assert f"the default on the first {count} questions of two of the sets" in text


def test_groups_that_are_full_of_tokens() -> None:
    names = [
        (frame, f"quality_600_{frame}_cpu", f"quality_600_{frame}_full_groups_cpu") for frame in ("plain", "short")
    ]
    want = [row for frame, now, before in names for row in kl_over(now, before, frame, questions=30)]
    assert table(PAGE, "wording and ratio, full groups that end where few links are cut") == want
    shares = list[str]()
    for _, _, before in names:
        (found,) = records_of(f"{before}.records.jsonl").values()
        rows = rows_of(found)
        ways = (("sink_attention", "similar", 0.15), ("full_reuse", "similar", 0.0))
        shares += [f"{100 * rows[way]['recovered']:.1f}" for way in ways]
    told = "{} % at 0.15 and {} % at 0 in `plain`, {} and {} % in `short`".format(*shares)
    assert f"than they did in bfloat16: {told}" in prose(PAGE)


def test_long_chunks_with_contexts() -> None:
    (rows,) = quality("quality_600_cpu.json").values()
    default, reused = (rows[way] for way in (("sink_attention", "similar", 0.15), ("full_reuse", "similar", 0.0)))
    told = f"the default recovered {with_interval(default)} at 0.15 and {with_interval(reused)} at 0"
    assert told in prose(PAGE)


def test_layers_that_choose_in_gemma() -> None:
    want = [
        row for frame, end in (("plain", ""), ("short", "_short"))
        for row in kl_over(
            f"quality_gemma_ten{end}_two_layers_cpu", f"quality_gemma_ten{end}_one_layer_cpu", frame, questions=60
        )
    ]  # fmt: skip
    assert table(PAGE, "wording and ratio, two layers of Gemma") == want


def test_names_and_numbers() -> None:
    sets = ("musique_train100", "hotpotqa_train100", "squad10")
    none, default, names = "full_reuse/none/0", "sink_attention/similar/0.15", "sink_attention_names/similar/0.15"
    want, logs = [], dict[str, list[float]]()
    for frame in ("plain", "short"):
        of_sets = records_of(f"quality_names_{frame}_cpu.records.jsonl").values()
        for name, rows in zip(sets, of_sets, strict=True):
            kl = {(row["question"], row["method"]): row["kl"] for row in rows}
            asked = sorted({row["question"] for row in rows})
            reuse, *sums = (sum(kl[one, method] for one in asked) for method in (none, default, names))
            shares = [f"{100 * (1 - left / reuse):.0f} %" for left in sums]
            here = [log(kl[one, names] / kl[one, default]) for one in asked]
            want.append([f"{name}, `{frame}`", str(len(asked)), *shares, *ratio_cells(here)])
            logs.setdefault(name, []).extend(here)
    assert table(PAGE, "set and wording, names") == want
    assert {name: mean(here) < 0 for name, here in logs.items()} == dict(zip(sets, (True, False, False), strict=True))


_RULES = {
    "layers 16 to 23": "layers_16_to_23",
    "layers 12 to 23": "layers_12_to_23",
    "layers 7 to 23": "layers_7_to_23",
    "layers 21 to 23": "layers_21_to_23",
    "layers 21 to 23, a tenth as anchors": "sink_attention_anchors",
    "`boundary+transfer`": "boundary+transfer",
    "a quarter for first tokens": "quarter_first_tokens",
    "half for first tokens": "half_first_tokens",
    "three quarters for first tokens": "three_quarters_first_tokens",
    "layers 16 to 23, half for first tokens": "layers_16_to_23_half_first_tokens",
    "weights 1 + 30 exp(-`o` / 15)": "weight_30_exp_15",
    "weights 1 + 100 exp(-`o` / 20)": "weight_100_exp_20",
    "weights 1 + 20 exp(-`o` / 10)": "weight_20_exp_10",
}


def test_layers_that_score() -> None:
    found = _of_layers("quality_layers_cpu.records.jsonl", "/similar/0.15")
    want = [
        [", ".join((name.split(", ")[0], f"`{name.split(', ')[1]}`")), *cells] for name, cells in _later(found).items()
    ]
    assert table(PAGE, "set and wording, layers that score") == want
    sets = list(dict.fromkeys(name.split(", ")[0] for name in found))
    rows = [
        [label, *(_over(found, corpus, rule, "layers_7_to_17") for corpus in sets)] for label, rule in _RULES.items()
    ]
    assert table(PAGE, "rule, layers that score") == rows


def test_layers_that_score_on_held_back_questions() -> None:
    want = []
    for frame in ("plain", "short"):
        names = [f"quality_held_ten_{frame}{kind}_cpu" for kind in ("_later_layers", "_earlier_layers")]
        want += kl_over(names[0], names[1], frame, 114)
        sums = [_sum_at_ratio(name) for name in names]
    assert table(PAGE, "wording and ratio, layers 16 to 23") == want
    assert f"by the sums, {100 * (1 - sums[0] / sums[1]):.0f} % less of the KL is left there." in prose(PAGE)


def test_layers_that_score_without_shifts() -> None:
    found = _of_layers("quality_layers_plain_kv_cpu.records.jsonl", "/none/0.15")
    want = [[name.split(", ")[0], *cells] for name, cells in _later(found).items()]
    assert table(PAGE, "set, plain KV") == want


def _fixed_ratios(kind: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of a record of `adaptive.py` by question and way of asking."""
    of_sets = records_of(f"adaptive_{kind}_cpu.records.jsonl").values()
    return {(row["question"], row["method"]): row for rows in of_sets for row in rows}


def _over_fixed(ours: str, theirs: str, ratio: str, along: str) -> list[str]:
    """Return the KL of one record over that of another at a fixed ratio, with the ratio of the sums."""
    one, other = _fixed_ratios(ours), _fixed_ratios(theirs)
    pairs = [(one[key][along], row[along]) for key, row in other.items() if key[1] == f"fixed {ratio}"]
    assert len(pairs) == 120
    typical, *others = ratio_cells([log(now / before) for now, before in pairs])
    ours_left, theirs_left = (sum(side) for side in zip(*pairs, strict=True))
    return [f"{typical} ({ours_left / theirs_left:.2f})", *others]


def test_layers_that_score_by_ratio() -> None:
    assert table(PAGE, "ratio, later layers") == [
        [ratio, *(cell for along in ("answer", "gold")
                  for cell in _over_fixed("later_layers", "earlier_layers", ratio, along))]
        for ratio in ("0.05", "0.15", "0.2", "0.3", "0.5")
    ]  # fmt: skip


_GROUPS = {
    "geometric mean of both groups' averages": "both_groups",
    "geometric mean, the layers 16 to 23 with three quarters of the weight": "both_groups_weighted",
    "harmonic mean of both groups' averages": "both_groups_harmonic",
    "half of the budget by each group": "half_by_each_group",
    "three quarters of the budget by the layers 16 to 23": "three_quarters_by_layers_16_to_23",
    "geometric mean over all layers from 7 to 23": "geometric_mean_of_layers_7_to_23",
    "mean of the roots, layers 7 to 23": "roots_of_layers_7_to_23",
    "mean of the roots, layers 16 to 23": "roots_of_layers_16_to_23",
    "highest of the layers 16 to 23": "highest_of_layers_16_to_23",
    "geometric mean of both groups' averages, whole numbers": "both_groups_whole_numbers",
    "the same with the space before a number": "both_groups_whole_numbers_and_space",
    "geometric mean of both groups' averages, whole words and numbers": "both_groups_whole_words",
}


def test_two_groups_of_layers() -> None:
    found = _of_layers("quality_groups_cpu.records.jsonl", "/similar/0.15")
    assert {len(rules["layers_16_to_23"]) for rules in found.values()} == {24}
    sets = list(dict.fromkeys(name.split(", ")[0] for name in found))
    want = [
        [label, *(_over(found, corpus, rule, "layers_16_to_23") for corpus in sets)] for label, rule in _GROUPS.items()
    ]
    assert table(PAGE, "rule, two groups") == want
    over = [re.split(r"[ ()]+", _over(found, corpus, "both_groups_whole_numbers", "both_groups")) for corpus in sets]
    typical, sums = ("{}, {} and {}".format(*(cells[side] for cells in over)) for side in (0, 1))
    assert f"that is {typical} times the KL of both groups alone (by the sums {sums})." in prose(PAGE)


_NUMBERS = {
    "twice the score": "numbers_twice",
    "four times the score": "numbers_four_times",
    "the best score of eight tokens on either side": "numbers_best_of_8_around",
    "half of the best score of eight tokens on either side": "numbers_half_of_the_best_of_8_around",
    "half of the best score of 16 tokens on either side": "numbers_half_of_the_best_of_16_around",
    "twice the mean of 16 tokens": "numbers_twice_the_mean_of_16_around",
}


def test_numbers_that_weigh_more() -> None:
    found = _of_layers("quality_numbers_cpu.records.jsonl", "/similar/0.15")
    assert table(PAGE, "numbers that weigh more") == [
        [label, *(_over(found, corpus, rule, "sink_attention") for corpus in found)] for label, rule in _NUMBERS.items()
    ]
    counts = [len(rules["sink_attention"]) for rules in found.values()]
    assert counts == [61, 60, 60, 60, 60, 60]


def _at_ratio(name: str, other: str, questions: int) -> list[list[str]]:
    """Return the KL of records over that of others at 0.15, by wording; braces in the names are for the wording."""
    rows = []
    for frame in ("plain", "short"):
        files = [one.format(frame) for one in (name, other)]
        _, (label, typical, *others) = kl_over(*files, frame, questions)
        ours, theirs = (_sum_at_ratio(file) for file in files)
        rows.append([label, f"{typical} ({ours / theirs:.2f})", *others])
    return rows


def _sum_at_ratio(name: str, sets: int = 3) -> float:
    """Return the KL of the default's answers at 0.15, over the first sets of a record."""
    return sum(
        row["kl"] for rows in [*records_of(f"{name}.records.jsonl").values()][:sets] for row in rows
        if row["method"] == "sink_attention/similar/0.15"
    )  # fmt: skip


def test_two_groups_and_whole_numbers_on_more_questions() -> None:
    first, held = "quality_ten_{}%s_cpu", "quality_held_ten_{}%s_cpu"
    both = first % "_both_groups"
    assert table(PAGE, "wording and ratio, two groups") == _at_ratio(both, first % "_later_layers", 120)
    whole = first % "_rounded_sums"
    assert table(PAGE, "wording and ratio, whole numbers") == _at_ratio(whole, both, 120)
    less = [
        100 * (1 - _sum_at_ratio(whole.format(frame), sets=1) / _sum_at_ratio(both.format(frame), sets=1))
        for frame in ("plain", "short")
    ]
    told = "where some of the furthest are, {:.0f} % less of the KL is left in `plain` and {:.0f} %"
    assert told.format(*less) in prose(PAGE)
    changed = _at_ratio(held % "_rounded_sums", held % "_later_layers", 114)
    assert table(PAGE, "wording and ratio, both changes") == changed


def test_the_residual_stream_in_float32() -> None:
    assert table(PAGE, "wording and ratio, residual stream in float32") == list(kl_rows("", "_rounded_sums"))
    rounded, kept = (
        quality(f"quality_sums_{way}_short_cpu.json")["musique_train100"] for way in ("rounded", "float32")
    )
    want = []
    for ratio in (0.15, 0.5, 0.99):
        rows = [of["sink_attention", "similar", ratio] for of in (rounded, kept)]
        cells = [f"{row['kl']:.4f}" for row in rows] + [f"{100 * row['recovered']:.1f} %" for row in rows]
        want.append([f"{ratio}", *cells])
    assert table(PAGE, "recomputed, residual stream") == want
    rose = []
    for frame in ("plain", "short"):
        ways = [records_of(f"quality_ten_{frame}{kind}_cpu.records.jsonl").values() for kind in ("", "_rounded_sums")]
        for pair in zip(*ways, strict=True):
            now, before = (rows_of(of)["sink_attention", "similar", 0.15]["recovered"] for of in pair)
            rose.append(100 * (now - before))
    text, full, of = prose(PAGE), record("rounding_cpu.json")["summary"], record("ttft_before_sums_cpu.json")
    ratios = [row["now_over_before"] for row in of["prompts"]]
    assert f"comes after {of['now_over_before']:.2f} times as long as in the version before" in text
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times for one of them" in text
    assert f"the shares rose by {min(rose):.1f} to {max(rose):.1f} points at 0.15" in text
    words = (
        "its KL from that is {engine:.4f}, that of plain transformers in bfloat16 {transformers:.4f}, {ratio:.2f} times"
    )
    assert words.format(**full) + f" by the geometric mean and lower in {100 * full['nearer']:.0f} %" in text


def test_two_groups_by_ratio() -> None:
    assert table(PAGE, "ratio, two groups") == [
        [ratio, *(cell for other in ("earlier_layers", "later_layers")
                  for cell in _over_fixed("eight_bit", other, ratio, "answer")[:2])]
        for ratio in ("0.05", "0.15", "0.2", "0.3", "0.5")
    ]  # fmt: skip


def test_anchors_of_other_layers() -> None:
    found = _of_layers("quality_anchors_cpu.records.jsonl", "/similar/0.15")
    assert {len(rules["sink_attention"]) for rules in found.values()} == {24}
    sets = list(dict.fromkeys(name.split(", ")[0] for name in found))
    rows = []
    for rule in next(iter(reversed(found.values()))):
        if rule.startswith("anchors"):
            _, ratio, _, first, _, last, *shifted = rule.split("_")
            # Anchors below the last layer, and all keys of the layers that score, of 30 layers of keys and values.
            share = (1 + bool(shifted)) * (float(ratio) * int(last) / 30 + (int(last) - int(first) + 1) / 60)
            over = [_over(found, corpus, rule, "sink_attention") for corpus in sets]
            layers = f"{first} to {last}" + ", with shifts" * bool(shifted)
            rows.append([layers, f"{100 * float(ratio):.0f} %", *over, f"{100 * share:.0f} %"])
    assert table(PAGE, "layers, anchors") == rows
    before = "anchors_0.1_layers_21_to_23"
    lost = max(
        (sum(rules[before].values()) - sum(rules["sink_attention"].values())) / sum(rules["full_reuse/none/0"].values())
        for rules in found.values()
    )
    assert f"To the default's layers that lost up to {100 * lost:.1f} points." in prose(PAGE)


_ANCHORS = {
    "17 layers": ("keys_of_17_layers", 1, 1),
    "9 layers": ("keys_of_9_layers", 1, 1),
    "5 layers": ("keys_of_5_layers", 1, 1),
    "17 layers, shifts of the scored keys": ("keys_of_17_layers_shifted_keys", 2, 1),
    "17 layers, scored keys and their shifts in four bits": ("keys_of_17_layers_shifted_keys_in_four_bits", 1, 1),
    "17 layers, shifts of scored keys and anchors": ("keys_of_17_layers_shifted", 2, 2),
}
"""By label, the rule's name, and how many times the bytes of scored keys, and of anchors, in eight bits are read."""


def test_anchors_for_two_groups_of_layers() -> None:
    found = _of_layers("quality_anchor_groups_cpu.records.jsonl", "/similar/0.15")
    assert {len(rules["sink_attention"]) for rules in found.values()} == {20}
    sets = list(dict.fromkeys(name.split(", ")[0] for name in found))
    rows = []
    for label, (name, keys, anchors) in _ANCHORS.items():
        for share in ("0.1", "0.25", "0.5", "1"):
            rule = f"anchors_{share}_{name}"
            if any(rule in rules for rules in found.values()):
                over = [_over(found, corpus, rule, "sink_attention") for corpus in sets]
                scored, below = int(name.split("_")[2]), 23
                read = (keys * scored / 2 + anchors * below * float(share)) / 60
                rows.append([label, f"{100 * float(share):.0f} %", *over, f"{100 * read:.0f} %"])
    assert table(PAGE, "anchors, two groups") == rows


def _of_layers(name: str, kind: str) -> dict[str, dict[str, dict[str, float]]]:
    """Return the KL by set and wording, rule and question."""
    kl: dict[str, dict[str, dict[str, float]]] = {}
    for of, rows in records_of(name).items():
        for row in rows:
            kl.setdefault(of, {}).setdefault(row["method"].removesuffix(kind), {})[row["question"]] = row["kl"]
    return kl


def _later(found: dict[str, dict[str, dict[str, float]]]) -> dict[str, list[str]]:
    """Return how many questions each set has, what both kinds of layers recover and how their KL compares."""
    rows = {}
    for name, rules in found.items():
        reuse, *sums = (
            sum(rules[rule].values()) for rule in ("full_reuse/none/0", "layers_7_to_17", "layers_16_to_23")
        )
        logs = [log(rules["layers_16_to_23"][question] / kl) for question, kl in rules["layers_7_to_17"].items()]
        shares = [f"{100 * (1 - left / reuse):.0f} %" for left in sums]
        rows[name] = [str(len(logs)), *shares, *ratio_cells(logs)]
    return rows


def _over(found: dict[str, dict[str, dict[str, float]]], corpus: str, rule: str, other: str) -> str:
    """Return a rule's KL over that of another on a set, by the geometric mean and by the sums."""
    pairs = [
        (kl, rules[other][question])
        for name, rules in found.items()
        if name.startswith(corpus)
        for question, kl in rules.get(rule, {}).items()
    ]
    if not pairs:
        return "-"
    ours, theirs = (sum(side) for side in zip(*pairs, strict=True))
    return f"{exp(mean(log(one / two) for one, two in pairs)):.2f} ({ours / theirs:.2f})"


def test_transfer_without_context_shifts() -> None:
    found = record("transfer_strength_cpu.json")
    assert (found["part"], found["passages"], found["ratio"]) == ("held", 10, 0.15)
    want = []
    for one in found["results"]:
        quarter, half = one["rows"]
        assert (quarter["strength"], half["strength"]) == (0.25, 0.5)
        logs = [log((kl["0.5"] + 1e-4) / (kl["0.25"] + 1e-4)) for kl in one["kl"].values()]
        shares = [f"{100 * row['recovered']:.0f} %" for row in (quarter, half)]
        want.append([f"{one['data']}, `{one['frame']}`", str(one["questions"]), *shares, *ratio_cells(logs)])
    assert table(PAGE, "set and wording, held back, transfer") == want
    dev = [{row["strength"]: row for row in one["rows"]} for one in record("transfer_strength_dev_cpu.json")["results"]]
    for strength, told in (
        (0.25, "a quarter recovered"),
        (0.5, "a half"),
        (0.75, "three quarters"),
        (1.0, "the whole"),
    ):
        first, second, third = (f"{100 * rows[strength]['recovered']:.0f}" for rows in dev)
        assert f"{told} {first}, {second} and {third} %" in prose(PAGE)
    gemma = [one["rows"] for one in record("transfer_strength_gemma_cpu.json")["results"]]
    shares = [[f"{100 * rows[place]['recovered']:.0f}" for rows in gemma] for place in (1, 0)]
    told = " and ".join(
        f"{' and '.join(of)} % with a {name}" for of, name in zip(shares, ("half", "quarter"), strict=True)
    )
    assert f"recovers {told}" in prose(PAGE)
