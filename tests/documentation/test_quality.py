"""Figures in docs/quality.md are those of the records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from statistics import mean, median
from typing import Any

import numpy as np

from fused_kv_llm.config import EngineConfig

from .records import (
    behind,
    held_back,
    prose,
    quality,
    record,
    records_of,
    rows_of,
    table,
    times,
    told_nearer,
    ways_of_recomputing,
    with_interval,
)

PAGE = "docs/quality.md"


def test_ten_passages() -> None:
    reuse, default = ("full_reuse", "similar", 0.0), ("sink_attention", "similar", 0.15)
    want = []
    for frame in ("plain", "short"):
        now, before = quality(f"quality_ten_{frame}_cpu.json"), quality(f"quality_ten_{frame}_before_cpu.json")
        records = records_of(f"quality_ten_{frame}_cpu.records.jsonl")
        for (name, rows), of_set in zip(now.items(), records.values(), strict=True):
            low, high = rows[default]["recovered_95"]
            held = held_back(of_set)
            cells = [rows[reuse], held[reuse], before[name][default], rows[default], held[default]]
            shares = [f"{100 * row['recovered']:.0f} %" for row in cells]
            shares[3] += f" ({100 * low:.0f} to {100 * high:.0f})"
            want.append([f"{name}, `{frame}`", *shares, f"{rows[default]['expected_rank_correlation']:.2f}"])
    assert table(PAGE, "set and wording") == want
    at = {column: sorted(int(row[column].split()[0]) for row in want) for column in (1, 4)}
    readme = prose("README.md")
    assert f"recovers {at[4][0]} to {at[4][-1]} % at 0.15, and {at[1][0]} to {at[1][-1]} % at 0 (" in readme


def test_ten_passages_in_float32() -> None:
    reuse, default = ("full_reuse", "similar", 0.0), ("sink_attention", "similar", 0.15)
    anchors, want, lost = ("sink_attention_anchors", "similar", 0.15), [], []
    for frame in ("plain", "short"):
        now = quality(f"quality_ten_{frame}_float32_cpu.json")
        records = records_of(f"quality_ten_{frame}_float32_cpu.records.jsonl")
        for (name, rows), of_set in zip(now.items(), records.values(), strict=True):
            held = held_back(of_set)
            low, high = rows[default]["recovered_95"]
            cells = [f"{100 * of[method]['recovered']:.0f} %" for method in (reuse, default) for of in (rows, held)]
            cells[2] += f" ({100 * low:.0f} to {100 * high:.0f})"
            want.append([f"{name}, `{frame}`", *cells])
            lost.append(f"{100 * (rows[default]['recovered'] - rows[anchors]['recovered']):.1f}")
            assert f"{100 * rows[anchors]['selection_share']:.0f}" == "11"
    assert table(PAGE, "set and wording, float32") == want
    words = "{}, {} and {} points less in `plain`, and {}, {} and {} in `short`"
    assert "has read 11 % of the KV in float32 before, 22 % of that in bfloat16. It recovers as much" in prose(PAGE)
    assert words.format(*lost) in prose(PAGE)
    at = {column: sorted(int(row[column].split()[0]) for row in want) for column in (1, 3)}
    readme = prose("README.md")
    assert f"in float32 {at[3][0]} to {at[3][-1]} % and {at[1][0]} to {at[1][-1]} %" in readme


def test_a_hundred_questions() -> None:
    (rows,) = quality("quality_hundred_short_cpu.json").values()
    half, none = rows["sink_attention", "similar", 0.15], rows["full_reuse", "similar", 0.0]
    assert half["questions"] == none["questions"] == 100
    low, high = half["recovered_95"]
    shares = [f"{100 * row[name]:.0f}" for name in ("recovered", "recovered_typical") for row in (half, none)]
    text = prose(PAGE)
    assert f"{shares[0]} % ({100 * low:.0f} to {100 * high:.0f}) are recovered at 0.15 and {shares[1]} % at 0" in text
    assert f"by the geometric mean, {shares[2]} and {shares[3]} %" in text
    (asked,) = records_of("quality_hundred_short_cpu.records.jsonl").values()
    kl = {(row["question"], row["method"]): row["kl"] for row in asked}
    ours = sorted((value, question) for (question, method), value in kl.items() if method.startswith("sink_attention"))
    assert 0.18 < ours[-1][0] / sum(value for value, _ in ours) < 0.22
    assert ours[-1][0] > kl[ours[-1][1], "full_reuse/none/0"]


def _fair(model: str, dtype: str, ratio: float = 0.15, kind: str = "sets") -> dict[tuple[str, str], dict[str, Any]]:
    at = model, dtype, kind, ratio
    (pooled,) = (
        one for one in record("fair_cpu.json")["pooled"]
        if (one["model"], one["dtype"], one["kind"], one["ratio"]) == at
    )  # fmt: skip
    return {(row["selector"], row["preprocessing"]): row for row in pooled["rows"]}


def _rule_rows(rows: Mapping[tuple[str, str], dict[str, Any]]) -> Iterator[list[str]]:
    for rule in sorted({name for name, _ in rows} - {"full_reuse", "full_prefill"}):
        if rule.endswith(("+transfer", "-transfer")):
            continue
        # The default has transfer by itself, the other rules are given it.
        plain, with_it = ("-transfer", "") if f"{rule}-transfer" in {name for name, _ in rows} else ("", "+transfer")
        pairs = [rows[f"{rule}{end}", made] for made in ("none", "fusionrag", "similar") for end in (plain, with_it)]
        read = f"{100 * rows[f'{rule}{with_it}', 'similar']['selection_share']:.0f} %"
        yield [f"`{rule}`", *(f"{100 * row['recovered']:.0f} %" for row in pairs), read]


def test_the_fair_table() -> None:
    rows = _fair("smollm2-135m", "bfloat16")
    assert table(PAGE, "rule at 0.15") == sorted(_rule_rows(rows), key=_by_ours)
    assert {row["questions"] for row in rows.values()} == {12}
    text = prose(PAGE)
    named = ", ".join(f"`{rule}`" for rule in behind(rows, "similar"))
    assert f"After our preprocessing these are worse than the default beyond chance: {named}." in text
    full, typical = (
        [f"{100 * rows['full_reuse', made][name]:.0f}" for made in ("fusionrag", "similar")]
        for name in ("recovered", "recovered_typical")
    )
    assert f"Full reuse wins back {full[0]} % after FusionRAG's preprocessing and {full[1]} % after ours" in text
    assert f"and of a typical question, by the geometric mean, {typical[0]} and {typical[1]} %" in text
    none, theirs, ours = (
        f"{100 * rows['fusionrag', made]['recovered_typical']:.0f} %" for made in ("none", "fusionrag", "similar")
    )
    assert (
        f"wins back {none} of a typical question without preprocessing, {theirs} after FusionRAG's and {ours}" in text
    )
    lost = rows["sink_attention", "similar"]["recovered"] - rows["sink_attention_anchors", "similar"]["recovered"]
    assert f"wins back {100 * lost:.0f} point less" in text
    aside = {"full_reuse", "full_prefill"}
    gain = {rule: rows[rule, "fusionrag"]["recovered"] - rows[rule, "none"]["recovered"]
            for rule, made in rows if made == "none" and rule not in aside}  # fmt: skip
    assert min(gain, key=lambda rule: gain[rule]).startswith("boundary")
    assert sum(value > 0 for value in gain.values()) > 2 / 3 * len(gain)


def test_answers_of_the_fair_table() -> None:
    rows, made = _fair("smollm2-135m", "bfloat16"), ("none", "fusionrag", "similar")
    rules = sorted({rule for rule, _ in rows if "transfer" not in rule and rule != "full_prefill"})
    want = [
        [f"`{rule}`", *(cell for one in made for row in [rows[rule, one]] for cell in
                        (f"{100 * row['gold_probability']:.1f} %", f"{100 * row['contains']:.0f} %",
                         f"{row['rouge_l']:.2f}"))] for rule in rules
    ]  # fmt: skip
    assert table(PAGE, "rule at 0.15, answers") == sorted(want, key=lambda cells: -float(cells[9]))
    text, full = prose(PAGE), rows["full_prefill", "none"]
    assert (
        f"a probability of {100 * full['gold_probability']:.1f} % and has it in {100 * full['contains']:.0f} %" in text
    )
    measures = ("gold_probability", "contains", "rouge_l")
    compared = [
        row["against_default"] for (_, one), row in rows.items() if one == "similar" and "against_default" in row
    ]
    assert len(compared) > 20
    assert all(one[measure]["p_holm"] > 0.05 for one in compared for measure in measures)
    liker = {rule for rule in rules if rows[rule, "similar"]["rouge_l"] > rows[rule, "none"]["rouge_l"] + 0.01}
    assert liker == {*rules} - {"prophetkv"}
    likelier = sum(rows[rule, "fusionrag"]["gold_probability"] > full["gold_probability"] for rule in rules)
    further = sum(rows[rule, "fusionrag"]["rouge_l"] < rows[rule, "similar"]["rouge_l"] for rule in rules)
    assert f"with {likelier} of {len(rules)} rules, and the answers of {further} are less like full prefill's" in text
    stored = {one["preprocessing"]: one for one in record("fair_cpu.json")["ingestion"]
              if (one["model"], one["dtype"]) == ("smollm2-135m", "bfloat16")}  # fmt: skip
    none, theirs, ours = (
        f"{stored[one]['seconds_per_chunk']:.2f} s and {stored[one]['bytes_per_chunk'] / 1e6:.1f} MB" for one in made
    )
    assert f"storing a chunk took {none}, FusionRAG's preprocessing {theirs} more, and ours {ours} more" in text


def test_a_judge_of_faithfulness() -> None:
    found = record("faithfulness_cpu.json")
    judged, answers = (sum(row[name] for row in found["rows"]) for name in ("judged", "answers"))
    told = f"`--judge-temperature {found['judge_temperature']:g}` SmolLM2-135M gave a verdict on {judged} of {answers}"
    assert f"with {told} answers, and its other lists were cut off unfinished" in prose(PAGE)
    left = [one["error"] for one in found["answers"] if one["faithfulness"] is None]
    assert len(left) == answers - judged
    assert all("incomplete due to a max_tokens length limit" in error for error in left)


def test_the_fair_table_of_gemma() -> None:
    rows = _fair("gemma3-270m", "bfloat16")
    assert table(PAGE, "rule at 0.15, Gemma") == sorted(_rule_rows(rows), key=_by_ours)
    assert {row["questions"] for row in rows.values()} == {3}
    text = prose(PAGE)
    pooled = record("fair_cpu.json")["pooled"]
    (sets,) = (one for one in pooled if one["model"] == "gemma3-270m")
    assert {one["model"] for one in pooled if one["kind"] == "RULER"} == {"smollm2-135m"}
    assert "Gemma has not been asked RULER's tasks" in text
    assert f"in {sets['cells']} of 16 cells" in text
    assert {one["dtype"] for one in pooled} == {"bfloat16"}
    assert "Neither model has been asked in float32" in text
    theirs, ours = (f"{100 * rows['full_reuse', made]['recovered']:.0f} %" for made in ("fusionrag", "similar"))
    assert f"Full reuse recovers {theirs} after FusionRAG's preprocessing and {ours} after ours. Three" in text
    with_transfer = {cells[0]: float(cells[2].removesuffix(" %")) for cells in _rule_rows(rows)}
    ahead = [rule for rule, share in with_transfer.items() if share > with_transfer["`sink_attention`"]]
    most = max(with_transfer, key=lambda rule: with_transfer[rule])
    assert f"{len(ahead)} rules with transfer recover more of them than the default, {most} most" in text


def test_the_fair_table_of_ruler() -> None:
    rows = _fair("smollm2-135m", "bfloat16", kind="RULER")
    assert table(PAGE, "rule at 0.15, RULER") == sorted(_rule_rows(rows), key=_by_ours)
    cells = [one for one in record("fair_cpu.json")["cells"] if one["data"].startswith("ruler_")]
    assert [one["questions"] for one in cells] == [1] * 9
    assert {row["questions"] for row in rows.values()} == {3}
    by_cell = [{(row["selector"], row["preprocessing"]): row for row in one["rows"]} for one in cells]
    worst, *others = sorted(round(100 * one["sink_attention", "similar"]["recovered"]) for one in by_cell)
    text = prose(PAGE)
    assert (
        f"of eight prompts the default recovers {others[0]} to {others[-1]} %, and {worst} % of one of 1,450 tokens"
        in text
    )
    harmed = [row["recovered"] < 0 for (_, made), row in by_cell[0].items() if made == "similar"]
    assert sum(harmed) > len(harmed) / 2
    found = 100 * rows["full_prefill", "none"]["answer_recall"]
    assert f"full prefill's answers hold {found:.0f} % of the strings" in text
    own = rows["sink_attention", "similar"]["recovered"]
    more = sorted((key for key, row in rows.items() if row["recovered"] > own), key=lambda key: -rows[key]["recovered"])
    more.remove(("full_prefill", "none"))
    assert f"{len(more)} others recover more in all, at most {100 * rows[more[0]]['recovered']:.0f} %" in text
    nearest = {(rule.removesuffix("+transfer"), made) for rule, made in more[:3]}
    assert nearest == {("cacheblend", "similar"), ("sink_attention-transfer", "fusionrag")}
    long = [one for one in by_cell if one["full_prefill", "none"]["ttft_median_s"] > 10]
    sooner = mean(one["full_prefill", "none"]["ttft_median_s"] / one["sink_attention", "similar"]["ttft_median_s"]
                  for one in long)  # fmt: skip
    assert len(long) == 3
    assert f"comes {sooner:.1f} times as soon as full prefill's" in text


def _by_ours(cells: list[str]) -> int:
    return -int(cells[6].removesuffix(" %"))


def test_rules_on_questions_that_were_held_back() -> None:
    found = record("quality_rules_cpu.json")
    assert (found["part"], found["passages"], found["frame"]) == ("held", 5, "plain")
    assert [rows["rows"][0]["questions"] for rows in found["results"]] == [20, 20, 20]
    rows = {(row["selector"], row["preprocessing"]): row for row in found["pooled"][0]["rows"]}
    assert table(PAGE, "rule, five passages") == sorted(_rule_rows(rows), key=_by_ours)
    text = prose(PAGE)
    kin = {"full_reuse", *(rule for rule, _ in rows if rule.startswith("sink_attention"))}
    level = {rule for rule, made in rows if made == "similar"} - {*behind(rows, "similar")} - kin
    assert level == {"boundary+transfer", "cache_craft_online+transfer"}
    told = (
        "of all rules after our preprocessing but these: `boundary+transfer`, `cache_craft_online+transfer` and its own"
    )
    assert f"beyond chance (Holm's correction over all comparisons) {told} kin." in text
    reused = [f"{100 * rows['full_reuse', made]['recovered']:.0f} %" for made in ("fusionrag", "similar")]
    assert f"wins back {reused[0]} after FusionRAG's preprocessing and {reused[1]} after ours" in text
    low, high = rows["sink_attention", "similar"]["recovered_95"]
    assert f"reaches from {100 * low:.0f} to {100 * high:.0f} %" in text
    ours, theirs = rows["sink_attention", "similar"], rows["boundary+transfer", "similar"]
    assert f"after {theirs['ttft_median_s']:.2f} instead of {ours['ttft_median_s']:.2f} s" in text
    aside = {"full_reuse", "full_prefill", "sink_attention", "sink_attention_anchors"}
    near = sorted({rule for rule, made in rows if made == "none"} - aside - set(behind(rows, "none")))
    assert all(rule.endswith("+transfer") for rule in near)
    *most, last = (f"`{rule.removesuffix('+transfer')}`" for rule in near)
    assert f"given transfer, {', '.join(most)} and {last} cannot be told from it" in text


def _held_back_rows(frame: str, dtype: str) -> Iterator[list[str]]:
    reuse, default = ("full_reuse", "similar", 0.0), ("sink_attention", "similar", 0.15)
    found = record(f"quality_held_ten_{frame}{dtype}_cpu.json")
    assert (found["part"], found["passages"], found["frame"]) == ("held", 10, frame)
    for name, rows in quality(f"quality_held_ten_{frame}{dtype}_cpu.json").items():
        row = rows[default]
        typical = f"{100 * row['recovered_typical']:.0f} %"
        yield [f"{name}, `{frame}`", str(row["questions"]), with_interval(rows[reuse]), with_interval(row), typical]


def test_held_back_questions_with_ten_passages() -> None:
    want = [cells for frame in ("plain", "short") for cells in _held_back_rows(frame, "")]
    assert table(PAGE, "set and wording, held back") == want
    in_float32 = [cells for frame in ("plain", "short") for cells in _held_back_rows(frame, "_float32")]
    assert table(PAGE, "set and wording, held back, float32") == in_float32
    text = prose(PAGE)
    assert f"MuSiQue ({want[0][1]}) and HotpotQA ({want[1][1]}), and {want[2][1]} of SQuAD's" in text
    held, first = (
        {row["question"] for rows in records_of(f"quality_{name}_short_cpu.records.jsonl").values() for row in rows}
        for name in ("held_ten", "ten")
    )
    assert f"{len(held & first)} of these {len(held)} are also in the tables above" in text
    at = [sorted(int(row[column].split()[0]) for row in want) for column in (3, 2)]
    kept = f"On {len(held)} held-back questions, {len(held & first)} of them among those, it is"
    assert f"{kept} {at[0][0]} to {at[0][-1]} % and {at[1][0]} to {at[1][-1]} %, and" in prose("README.md")


def test_rules_with_ten_passages() -> None:
    pooled = {
        frame: {
            (row["selector"], row["preprocessing"]): row
            for row in record(f"quality_held_ten_{frame}_rounded_sums_cpu.json")["pooled"][0]["rows"]
        }
        for frame in ("plain", "short")
    }
    default = "sink_attention"
    named = [rule for rule, made in pooled["plain"] if made == "similar" and rule != "full_reuse"]
    want = []
    for rule in sorted(named, key=lambda rule: -pooled["short"][rule, "similar"]["recovered"]):
        cells = [f"`{rule}`"]
        for rows in pooled.values():
            none, ours = rows[rule, "none"], rows[rule, "similar"]
            cells += [f"{100 * row['recovered']:.0f} %" for row in (none, ours)] + [f"{ours['kl_p95']:.3f}"]
        want.append(cells)
    assert table(PAGE, "rule, ten passages") == want
    plain, short = pooled.values()
    *most, last = (f"`{rule}`" for rule in behind(plain, "similar"))
    assert set(behind(short, "similar")) == set(named) - {default}
    (nearest,) = set(named) - {default, *behind(plain, "similar")}
    text = prose(PAGE)
    listed = f"{', '.join(most)} and {last}"
    assert f"(Holm's correction) of {listed} in both wordings, and in `short` of `{nearest}` as well." in text
    assert f"ahead of {listed} beyond chance in both wordings;" in prose("README.md")
    for rows in (plain, short):
        near = [rule for rule in named if rule != default and rule not in behind(rows, "none")]
        assert near == ["prophetkv"]
        assert f"Without preprocessing it is ahead of all but `{near[0]}` in both." in text
    ahead_of_all = []
    for frame in pooled:
        for of_set in record(f"quality_held_ten_{frame}_rounded_sums_cpu.json")["results"]:
            rows = {(row["selector"], row["preprocessing"]): row for row in of_set["rows"]}
            others = set(named) - {default}
            if others <= set(behind(rows, "similar")):
                ahead_of_all.append(f"{of_set['data']}, {frame}")
            sure = [rule for rule in others if rows[rule, "similar"]["kl_p_holm"] < 0.05]
            assert all(rows[rule, "similar"]["kl"] > rows[default, "similar"]["kl"] for rule in sure)
    assert ahead_of_all == [f"{name}, {frame}" for frame in pooled for name in ("hotpotqa_train100", "squad10")]
    assert "ahead of all five on squad10 and hotpotqa_train100 in both wordings" in text
    assert plain[nearest, "similar"]["selection_share"] == 0
    assert f"`{nearest}`, which needs no probe, recovers most of the five" in text
    assert nearest == max(set(named) - {default}, key=lambda rule: plain[rule, "similar"]["recovered"])
    assert {rows[default, "similar"]["questions"] for rows in pooled.values()} == {114}


def test_the_fair_table_at_other_ratios() -> None:
    few, more, most = by_ratio = [_fair("smollm2-135m", "bfloat16", ratio) for ratio in (0.05, 0.3, 0.5)]
    assert {row["questions"] for rows in by_ratio for row in rows.values()} == {6}
    aside = {"full_reuse", "full_prefill"}
    rules = [name for name, made in few if made == "none" and "transfer" not in name and name not in aside]
    want = [
        [f"`{rule}`", *(f"{100 * rows[rule, made]['recovered']:.0f} %"
                        for rows in by_ratio for made in ("none", "fusionrag", "similar"))] for rule in rules
    ]  # fmt: skip
    assert table(PAGE, "rule, other ratios") == sorted(want, key=lambda cells: cells[0])
    assert all(few[rule, "similar"]["recovered"] >= more[rule, "none"]["recovered"] for rule in rules)
    helped = [sum(rows[rule, "fusionrag"]["recovered"] > rows[rule, "none"]["recovered"] for rule in rules)
              for rows in (few, most)]  # fmt: skip
    assert helped == [len(rules), len(rules) / 2]


def test_reading_less_first() -> None:
    few, whole = "sink_attention_anchors", "sink_attention"
    names = {"plain": "quality_read_first_cpu.json", "short": "quality_read_first_short_cpu.json"}
    for frame, name in names.items():
        found = record(name)
        assert [found[key] for key in ("part", "passages", "frame", "dtype")] == ["all", 10, frame, "bfloat16"]
    plain, short = (quality(name) for name in names.values())
    want = []
    for name in plain:
        of_set = [rows[name] for rows in (plain, short)]
        assert {row["questions"] for rows in of_set for row in rows.values()} == {40}
        for rule in (whole, few, "qcfuse"):
            rows = [found[rule, "similar", 0.15] for found in of_set]
            share = f"{100 * max(row['selection_share'] for row in rows):.0f} %"
            want.append([name, f"`{rule}`", *(with_interval(row) for row in rows), share])
    assert table(PAGE, "set, little first") == want
    apart = []
    for method in ((whole, "similar", 0.15), ("full_reuse", "similar", 0.0)):
        before = [records_of(f"quality_ten_{frame}_rounded_sums_cpu.records.jsonl").values() for frame in names]
        pairs = [(rows[method], rows_of(old)[method]) for new, of_sets in zip((plain, short), before, strict=True)
                 for rows, old in zip(new.values(), of_sets, strict=True)]  # fmt: skip
        apart.append(f"{100 * max(abs(new['recovered'] - old['recovered']) for new, old in pairs):.1f}")
    assert "recovers up to {} points more or less at 0.15 and up to {} points at 0".format(*apart) in prose(PAGE)


def test_reading_less_first_on_held_back_questions() -> None:
    few, whole = "sink_attention_anchors", "sink_attention"
    want, read, apart = [], set(), []
    for frame in ("plain", "short"):
        found = record(name := f"quality_read_first_held_{frame}_cpu.json")
        asked = [found[key] for key in ("part", "passages", "frame", "dtype", "order")]
        assert asked == ["held", 10, frame, "bfloat16", "shuffled"]
        of_sets = quality(name)
        assert [rows[few, "none", 0.15]["questions"] for rows in of_sets.values()] == [39, 35, 40]
        for data, rows in of_sets.items():
            ways = [(rule, made, 0.15) for made in ("similar", "none") for rule in (whole, few)]
            assert len({rows[way]["questions"] for way in ways}) == 1
            want.append([f"{data}, `{frame}`", *(f"{100 * rows[way]['recovered']:.1f} %" for way in ways)])
            read.add(f"{100 * rows[few, 'none', 0.15]['selection_share']:.0f}")
            apart += [(made, data, frame, rows[few, made, 0.15]["kl"] < rows[whole, made, 0.15]["kl"])
                      for made in ("similar", "none") if rows[few, made, 0.15]["kl_p_holm"] < 0.05]  # fmt: skip
    assert table(PAGE, "set and wording, held back, little first") == want
    assert f"so {' and '.join(read)} % is read first" in prose(PAGE)
    ((made, data, frame, is_ahead),) = apart
    assert made == "none"
    assert is_ahead
    assert (
        f"Without it, the rule with the copy is ahead of the default beyond chance (Holm's correction) on {data} in"
        f" `{frame}`, and on no other set." in prose(PAGE)
    )


def test_adaptive() -> None:
    assert table(PAGE, "way") == ways_of_recomputing("adaptive_sums_cpu.json")
    listed = record("adaptive_sums_cpu.json")["rows"]
    rows = {(row["way"], row["along"]): row for row in listed}
    assert {row["questions"] for row in listed} == {120}
    text = prose(PAGE)
    assert f"which rests on the worst six, is {told_nearer(listed)} lower" in text
    default = rows[f"adaptive {EngineConfig().adaptive_target}", "answer"]
    lower, share = 1 - default["p95"] / default["fixed_p95"], default["mean_share"]
    assert f"recomputes {100 * share:.1f} % on average, and its p95 is {100 * lower:.1f} % lower" in text
    assert lower > 0.3
    assert share < 0.15
    asked = _adaptive("adaptive_sums_cpu.records.jsonl")
    _, low, high = _lower_than_fixed(asked, f"adaptive {EngineConfig().adaptive_target}", _p95)
    assert f"({100 * low:.0f} to {100 * high:.0f} by a bootstrap over the questions)" in text
    assert rows["adaptive, all to 0.15", "answer"]["rank_correlation"] > 0.6
    musique, *_ = records_of("adaptive_sums_cpu.records.jsonl").values()
    own, *fixed = (
        f"{median(row['seconds'] for row in musique if row['method'] == way):.2f}"
        for way in (f"adaptive {EngineConfig().adaptive_target}", "fixed 0.15", "fixed 0.3", "fixed 0.5")
    )
    assert f"took {own} s in the median with the default target, and {fixed[0]}, {fixed[1]} and {fixed[2]} s" in text
    assert rows["fixed 0.5", "answer"]["p95"] < default["p95"]


def _adaptive(name: str) -> dict[str, dict[str, Any]]:
    """Return the records of a run by question and way."""
    asked: dict[str, dict[str, Any]] = {}
    for rows in records_of(name).values():
        for row in rows:
            asked.setdefault(row["question"], {})[row["method"]] = row
    return asked


def _lower_than_fixed(
    asked: Mapping[str, Mapping[str, Any]], way: str, of: Callable[[Any], Any]
) -> tuple[float, float, float]:
    """Return by how much `of` a way's KL is lower than of a fixed ratio's with the same mean, and its interval."""
    ways = [way, *(method for method in next(iter(asked.values())) if method.startswith("fixed"))]
    kl, share = (
        np.array([[rows[name][key] for name in ways] for rows in asked.values()]) for key in ("answer", "share")
    )

    def lower(drawn: Any) -> float:
        (own, *fixed), (mean_share, *shares) = of(kl[drawn]), share[drawn].mean(0)
        return float(1 - own / np.interp(mean_share, shares, fixed))

    found = [lower(drawn) for drawn in np.random.default_rng(0).integers(len(kl), size=(2000, len(kl)))]
    low, high = np.quantile(found, (0.025, 0.975))
    return lower(slice(None)), float(low), float(high)


def _p95(kl: Any) -> Any:
    return np.quantile(kl, 0.95, axis=0)


def test_adaptive_on_held_back_questions() -> None:
    first, held = (_adaptive(f"adaptive_{name}_cpu.records.jsonl") for name in ("sums", "held"))
    way, text = f"adaptive {EngineConfig().adaptive_target}", prose(PAGE)
    both = {**first, **held}
    assert (len(held), len(held) + len(first) - len(both), len(both)) == (114, 48, 186)
    mean_lower, *_ = _lower_than_fixed(held, way, lambda kl: kl.mean(0))
    lower, low, high = _lower_than_fixed(held, way, _p95)
    share = mean(rows[way]["share"] for rows in held.values())
    assert (
        f"on these 114 it recomputes {100 * share:.1f} % on average, its mean is {100 * mean_lower:.0f} % lower" in text
    )
    assert f"its p95 {100 * lower:.1f} % lower ({100 * low:.0f} to {100 * high:.0f})" in text
    lower, low, high = _lower_than_fixed(both, way, _p95)
    told = f"On the 186 questions of both runs p95 is {100 * lower:.1f} % lower ({100 * low:.0f} to {100 * high:.0f})"
    assert told in text
    rows = {(row["way"], row["along"]): row for row in record("adaptive_held_cpu.json")["rows"]}
    rank = rows["adaptive, all to 0.15", "answer"]["rank_correlation"]
    assert f"the rank correlation is {rank:.2f} on the held-back ones" in text


def test_long_chunks() -> None:
    ways = (("sink_attention", "similar", 0.15), ("full_reuse", "similar", 0.0))
    want = []
    for frame, dtype in product(("plain", "short"), ("bfloat16", "float32")):
        name = f"quality_600_{frame}_cpu" if dtype == "bfloat16" else f"quality_600_{frame}_float32_cpu"
        assert [record(f"{name}.json")[of] for of in ("frame", "dtype", "passages")] == [frame, dtype, 10]
        (rows,) = quality(f"{name}.json").values()
        assert {row["questions"] for row in rows.values()} == {30}
        row = [f"`{frame}`, {dtype} (`{name}.md`)"]
        for way in ways:
            low, high = rows[way]["recovered_95"]
            row += [f"{100 * rows[way]['recovered']:.1f} %", f"{100 * low:.1f} to {100 * high:.1f}"]
        want.append(row)
    assert table(PAGE, "wording, chunks of 600 tokens") == want


def test_a_second_model_beside_plain_transformers() -> None:
    rows = {(row["length"], row["ratio"]): row for row in record("fidelity_gemma_cpu.json")["rows"]}
    want = []
    for length in dict.fromkeys(length for length, _ in rows):
        exact = rows[length, 1.0]
        assert exact["all_tokens_same"]
        assert exact["largest_difference"] <= 1e-4
        losses = [f"{rows[length, ratio]['kl']:.3f}" for ratio in (0.0, 0.15)]
        want.append([f"{length:,}", *losses, f"{exact['largest_difference']:.0e}"])
    assert table(PAGE, "length") == want


def test_a_second_model_with_ten_passages() -> None:
    plain, short = quality("quality_gemma_ten_cpu.json"), quality("quality_gemma_ten_short_cpu.json")
    want = []
    for name in plain:
        cells = [name]
        for rows in (plain[name], short[name]):
            for rule, ratio in (("full_reuse", 0.0), ("sink_attention", 0.15)):
                assert rows[rule, "similar", ratio]["questions"] == 20
                cells.append(with_interval(rows[rule, "similar", ratio]))
        want.append(cells)
    assert table(PAGE, "set of Gemma, ten passages") == want


def test_the_second_model_is_sooner() -> None:
    rows = {row["what"]: row for row in record("ttft_gemma_cpu.json")["rows"]}
    row, text = rows["fused 0.15 warm"], prose(PAGE)
    want = f"{row['ttft_s']:.2f} s at 0.15, {times(row['speedup'])} times sooner than plain transformers'"
    assert want in text
    assert f"{row['operators']:.1f} times by operators and {row['reuse']:.1f} times by reuse" in text


def _mean_of_sets(sets: list[dict[str, Any]], *names: str) -> str:
    return f"{mean(rows[name] for rows in sets for name in names):.2f}"


def test_preprocessed_kv() -> None:
    by_set = record("preprocessed_kv_cpu.json")["sets"]
    assert list(by_set) == ["musique_train100", "hotpotqa_train100", "squad10"]
    want = []
    for at, first in enumerate(by_set["musique_train100"]):
        sets = [rows[at] for rows in by_set.values()]
        assert {row["questions"] for row in sets} == {12}
        places = "early", "late"
        cells = [first["preprocessing"]]
        cells += [_mean_of_sets(sets, f"keys, second, {place}", f"values, second, {place}") for place in places]
        cells += [_mean_of_sets(sets, f"{part}, all, {place}") for part in ("keys", "values") for place in places]
        for rule in ("full reuse", "fusionrag", "default"):
            shares = [f"{100 * row[rule] + 0.0:.0f}".replace("-0", "0") for row in sets if rule in row]
            cells.append(f"{', '.join(shares)} %" if shares else "-")
        want.append(cells)
    assert table(PAGE, "KV of chunks, ten passages") == want
