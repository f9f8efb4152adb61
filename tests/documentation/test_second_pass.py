"""Figures of the second pass in docs/experiments.md are those of the records."""

from __future__ import annotations

import pytest

from .records import kl_rows, prose, record, records_of, rows_of, second_passes, table

PAGE = "docs/experiments.md"


@pytest.mark.parametrize(
    ("dtype", "kinds"), [("bfloat16", ("_linears", "_in_full")), ("float32", ("_float32_linears", "_float32_in_full"))]
)
def test_the_second_pass_in_eight_bits(dtype: str, kinds: tuple[str, str]) -> None:
    want = list(kl_rows(*kinds))
    assert table(PAGE, f"wording and ratio, eight bits, {dtype}") == want
    default, lost = ("sink_attention", "similar", 0.15), list[float]()
    for frame in ("plain", "short"):
        eight, full = (
            [
                rows_of(of)[default]["recovered"]
                for of in records_of(f"quality_ten_{frame}{kind}_cpu.records.jsonl").values()
            ]
            for kind in kinds
        )
        lost += [100 * (b - a) for a, b in zip(eight, full, strict=True)]
    text = prose(PAGE)
    place = "in float32, set by set" if dtype == "float32" else "in bfloat16, where rounding"
    points = "points " if dtype == "float32" else ""
    assert f"{min(lost):.1f} to {max(lost):.1f} {points}{place}" in text


def test_attention_in_eight_bits() -> None:
    want = list(kl_rows("_float32_earlier_layers", "_float32_attention_in_full", questions=40))
    assert table(PAGE, "wording and ratio, attention in eight bits, float32") == want
    want = list(kl_rows("_gated", "_linears"))
    assert table(PAGE, "wording and ratio, attention in eight bits, bfloat16") == want
    of = record("second_pass_attention_cpu.json")
    eight, full = (f"{of['total_over_first'][f'float32{way}']['2']:.2f}" for way in ("", " attention in full"))
    (chunks,) = {run["chunks"] for run in of["runs"]}
    words = f"took {eight} times as long as the first with it and {full} times without ({chunks} passages"
    assert words in prose(PAGE)


def test_native_products() -> None:
    assert table(PAGE, "wording and ratio, native products") == list(kl_rows("_earlier_layers", "_gated"))
    text = prose(PAGE)
    for name, more in (("native", ", {:.2f} to {:.2f} with two;"), ("gated", " on")):
        of = record(f"second_pass_bfloat16_{name}_cpu.json")["total_over_first"]["bfloat16"]
        runs = second_passes(f"bfloat16_{name}", prompts=2)
        words = f"{of['1']:.2f} and {of['2']:.2f} times as long as the first with one and two prompts (medians of three"
        assert f"{words} runs{more.format(runs[0], runs[-1])}" in text


def test_native_products_with_avx2() -> None:
    text = prose(PAGE)
    for name, words in (
        ("avx2_seven_bits", "times as long as the first with one and two prompts (medians of three runs, {} to {}"),
        ("avx2", "times as long as the first (medians of three runs, {} to {} with two; on another day,"),
        ("avx2_before", "times in the version before ({} to {};"),
    ):
        of = record(f"second_pass_{name}_cpu.json")["total_over_first"]["float32"]
        runs = [f"{ratio:.2f}" for ratio in second_passes(name, prompts=2)]
        assert len(runs) == 3
        assert f"{of['1']:.2f} and {of['2']:.2f} {words.format(runs[0], runs[-1])}" in text
    assert table(PAGE, "wording and ratio, eight bits with AVX2") == list(kl_rows("_float32", "_float32_seven_bits"))
    (_, plain, _, _), _, (_, short, _, _), _ = kl_rows("_float32_seven_bits", "_float32_earlier_layers")
    seven = f"had been {plain} times that with shifts made with VNNI in `plain` and {short} times in `short`."
    (_, plain, within, _), _, (_, short, within_short, _), _ = kl_rows("_float32", "_float32_earlier_layers")
    assert f"{seven} Now it is {plain} times ({within}) and {short} times ({within_short}; 120 questions" in text


def test_the_second_pass_beside_the_first() -> None:
    of = record("second_pass_cpu.json")
    factors = {
        dtype: {int(prompts): f"{ratio:.2f}" for prompts, ratio in ratios.items()}
        for dtype, ratios in of["total_over_first"].items()
    }
    single, half = factors["float32"], factors["bfloat16"]
    one, vnni = (record(f"second_pass_{name}_cpu.json") for name in ("eight_bit", "vnni"))
    ways = (one, "float32"), (vnni, "float32"), (vnni, "bfloat16")
    in_eight, in_full = (
        {
            prompts: [f"{of['total_over_first'][f'{dtype}{kind}'][prompts]:.2f}" for of, dtype in ways]
            for prompts in ("1", "2")
        }
        for kind in ("", " in full")
    )
    want = [[prompts, *in_eight[prompts], *in_full[prompts]] for prompts in in_eight]
    assert table(PAGE, "`preprocessing_prompts`, both passes over the first") == want
    text = prose(PAGE)
    for of, dtype in ways:
        firsts = [run["first_pass_s"] for run in of["runs"] if run["dtype"] == dtype]
        assert f"{min(firsts):.0f} to {max(firsts):.0f} s" in text
    assert f"takes {half[1]}, {half[2]} and {half[4]} times as long as a plain one in bfloat16" in text
    assert f"{single[1]}, {single[2]} and {single[4]} times in float32" in text
    again = record("second_pass_vnni_again_cpu.json")["total_over_first"]
    two, one = ([f"{again[dtype][prompts]:.2f}" for dtype in ("bfloat16", "float32")] for prompts in ("2", "1"))
    assert f"took {two[0]} times as long as the first in bfloat16 and {two[1]} times in float32 with two" in text
    assert f"{one[0]} and {one[1]} times with one (`second_pass_vnni_again_cpu.json`" in text
    before = record("second_pass_bfloat16_cpu.json")["total_over_first"]
    assert f"Ingestion takes {before:.1f} instead of 6.4 times as long" in text


def test_the_second_pass_with_attention_in_eight_bits() -> None:
    of = {dtype: record(f"second_pass_{dtype}_attention_cpu.json") for dtype in ("float32", "bfloat16")}
    single, half = (one["total_over_first"][dtype] for dtype, one in of.items())
    text = prose(PAGE)
    before = of["bfloat16"]["total_over_first"]["bfloat16 attention in full"]
    assert f"{half['1']:.2f} and {half['2']:.2f} times as long as the first with one and two prompts" in text
    assert f"in float32 {single['1']:.2f} and {single['2']:.2f} times with it" in text
    assert f"{before['1']:.2f} and {before['2']:.2f} times with attention in bfloat16" in text


def test_the_first_token_comes_no_later_than_before() -> None:
    of = record("ttft_before_cpu.json")
    ratios = [row["now_over_before"] for row in of["prompts"]]
    assert {(len(row["all_before_s"]), len(row["all_now_s"])) for row in of["prompts"]} == {(12, 12)}
    assert all(row["computed_before"] == row["computed_now"] for row in of["prompts"])
    text = prose(PAGE)
    assert f"after {of['now_over_before']:.2f} times as long in the geometric mean of six prompts" in text
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times for one of them" in text
