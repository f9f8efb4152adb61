"""Figures in docs/methods.md are those of the records."""

from __future__ import annotations

from statistics import mean
from typing import Any

from .records import prose, record, records_of, table

PAGE = "docs/methods.md"


def test_the_probe() -> None:
    rows = table(PAGE, "prompt tokens")
    assert rows == [
        ["probe and selection", *(f"{100 * row['probe_share']:.1f} %" for row in record("probe_cpu.json")["lengths"])]
    ]


def test_the_profile_of_anchors() -> None:
    found = record("anchor_profile_cpu.json")
    want = [[f"`{rule}`", *(f"{100 * recall:.1f} %" for recall in of_rule.values())]
            for rule, of_rule in found["recall"].items()]  # fmt: skip
    assert table(PAGE, "anchors") == want
    whole = found["recall_of_full_context"]
    assert f"On {found['samples']} questions of squad10 with SmolLM2-135M" in prose(PAGE)
    assert f"The whole context finds {100 * whole:.1f} %" in prose(PAGE)
    assert (found["rule"], found["ratio"]) == ("kvzip", 0.2)
    assert found["recall"]["kvzip"]["0.1"] < 0.95 * whole <= found["recall"]["kvzip"]["0.2"]


def test_qcfuse_with_the_anchors_of_the_profile() -> None:
    asked: dict[str, dict[tuple[str, str], dict[str, Any]]] = {
        name: {(row["question"], row["method"]): row for rows in
               records_of(f"quality_qcfuse_{name}_cpu.records.jsonl").values() for row in rows}
        for name in ("fifth", "tenth")
    }  # fmt: skip
    questions = {question for question, _ in asked["fifth"]} & {question for question, _ in asked["tenth"]}
    kl = {(name, method): sum(rows[question, method]["kl"] for question in questions)
          for name, rows in asked.items()
          for method in ("qcfuse/similar/0.15", "sink_attention/similar/0.15", "full_reuse/none/0")}  # fmt: skip
    fifth, tenth, default = (
        f"{100 * (1 - kl[name, method] / kl[name, 'full_reuse/none/0']):.1f}"
        for name, method in (("fifth", "qcfuse/similar/0.15"), ("tenth", "qcfuse/similar/0.15"),
                             ("tenth", "sink_attention/similar/0.15"))
    )  # fmt: skip
    read = (mean(rows[question, "qcfuse/similar/0.15"]["selection_share"] for question in questions)
            for rows in asked.values())  # fmt: skip
    text = prose(PAGE)
    assert fifth == tenth
    assert f"as much as with a tenth, {fifth} % of {len(questions)} held-back questions" in text
    assert "reads {:.0f} instead of {:.0f} % of the KV first".format(*(100 * share for share in read)) in text
    assert f"the default recovers {default} % of them" in text


def test_variants_of_chunks() -> None:
    found = record("variants_cpu.json")
    want = []
    for row in found["rows"][1:]:
        low, high = (f"{100 * end:.0f}" for end in row["interval"])
        recovered = f"{100 * row['recovered']:.0f} % ({low} to {high})"
        want.append([row["way"], f"{100 * row['computed']:.0f} %", recovered, f"{row['ttft_median_s']:.2f} s"])
    assert table(PAGE, "KV and rule") == want
    settings, stored = found["settings"], found["stored"]
    text, rows = prose(PAGE), {row["way"]: row for row in found["rows"]}
    early, whole = rows["variants, alpha 1"], rows["variants, alpha 1, all layers"]
    faster, less = early["ttft_median_s"] / whole["ttft_median_s"], whole["recovered"] - early["recovered"]
    assert f"takes {faster:.2f} times as long, and wins back {100 * less:.0f} points less" in text
    assert f"Measured on {settings['questions']} questions of {settings['data']} without preprocessing" in text
    assert (settings["askings"], settings["passages"], settings["pool"]) == (3, 5, 8)
    assert round(stored["variants"]["bytes"] / stored["plain"]["bytes"]) == 2
    assert stored["plain"]["chunks"] == 4 * stored["few variants"]["chunks"]
