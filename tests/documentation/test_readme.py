"""Figures in README.md are those of the records."""

from __future__ import annotations

from .records import behind, prose, quality, record, second_passes, table, times

PAGE = "README.md"


def ttft(name: str) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in record(name)["rows"]:
        found.setdefault(row["prompt_tokens"], {})[row["what"]] = row["ttft_s"]
    return found


def test_time_to_first_token() -> None:
    want = []
    for tokens, seconds in ttft("ttft_cpu.json").items():
        plain, alone = seconds["plain"], seconds["fused 1 warm"]
        row = [f"{tokens:,}", f"{plain:.2f} s", f"{alone:.2f} s ({times(plain / alone)}x)"]
        for fused in (seconds["fused 0.15 warm"], seconds["fused 0 warm"]):
            row += [f"{fused:.2f} s ({times(plain / fused)}x)", f"{times(plain / alone)} x {times(alone / fused)}"]
        want.append(row)
    assert table(PAGE, "prompt tokens") == want


def test_time_to_first_token_in_the_text() -> None:
    text = prose(PAGE)
    found = ttft("ttft_cpu.json")[3635]
    plain, alone, fused, cold = (
        found[what] for what in ("plain", "fused 1 warm", "fused 0.15 warm", "fused 0.15 cold")
    )
    assert f"comes **{times(plain / fused)} times sooner**" in text
    assert f"gives {times(alone / fused)}x of that, faster CPU operators give {times(plain / alone)}x" in text
    assert (
        f"is {times(plain / cold)} times as fast as plain transformers at 3,635 tokens ({times(alone / cold)}x" in text
    )
    assert f"takes {record('ttft_cpu.json')['memory']['times_kv']:.1f} times the bytes of its KV" in text
    wide = ttft("ttft_cpu_float32.json")[3635]
    assert (
        f"took {wide['plain']:.2f} s in plain transformers, {wide['fused 1 warm']:.2f} s at ratio 1, "
        f"{wide['fused 0.15 warm']:.2f} s at ratio 0.15 ({times(wide['plain'] / wide['fused 0.15 warm'])}x) and "
        f"{wide['fused 0 warm']:.2f} s at ratio 0 ({times(wide['plain'] / wide['fused 0 warm'])}x)"
    ) in text
    ingested = record("ingestion_cpu.json")
    assert (ingested["chunks"], f"Thirty chunks of the demo ({ingested['tokens']:,} tokens)" in text) == (30, True)
    rate = ingested["chunks_per_minute"]
    assert f"{rate['similar']:.0f} chunks a minute" in text
    assert f"{rate['none']:.0f} without; {rate['bare']:.0f} in a bare batched forward" in text
    limits = [
        [row["times_limit"] for row in record("ttft_cpu.json")["rows"] if row["what"] == f"fused {ratio} warm"]
        for ratio in (0.15, 0.05)
    ]
    assert f"takes {min(limits[0]):.1f} to {max(limits[0]):.1f} times as long" in text
    assert f"and {min(limits[1]):.1f} to {max(limits[1]):.1f} times at 0.05" in text


def test_rules() -> None:
    (pooled,) = record("quality_rules_cpu.json")["pooled"]
    rows = {(row["selector"], row["preprocessing"]): row for row in pooled["rows"]}
    assert {row["questions"] for row in rows.values()} == {60}
    want = []
    for name, *_, looks, source in table(PAGE, "rule"):
        rule = name.split("`")[1]
        ways = ("-transfer", "") if f"{rule}-transfer" in {key for key, _ in rows} else ("", "+transfer")
        cells = [rows.get((rule + way, made)) for made in ("none", "similar") for way in ways]
        want.append([name, *("" if row is None else f"{100 * row['recovered']:.0f} %" for row in cells), looks, source])
    assert table(PAGE, "rule") == want
    assert f"alone it wins back {100 * rows['full_reuse', 'similar']['recovered']:.0f} %" in prose(PAGE)
    others = {row[0].split("`")[1] for row in want} - {"full_reuse", "sink_attention"}
    level = {rule + way for rule in others for way in ("", "+transfer")} - {*behind(rows, "similar")}
    assert level == {"boundary+transfer", "cache_craft_online+transfer"}
    told = (
        "ahead of all these rules beyond chance, with transfer or without, but for `boundary` and `cache_craft_online`"
    )
    assert f"{told} with transfer, from which it cannot be told." in prose(PAGE)


def test_all_hundred_questions() -> None:
    (rows,) = quality("quality_hundred_short_cpu.json").values()
    half, none = rows["sink_attention", "similar", 0.15], rows["full_reuse", "similar", 0.0]
    shares = " and ".join(f"{100 * row['recovered']:.0f}" for row in (half, none))
    assert f"with all 100 it is {shares} % in one wording" in prose(PAGE)
    first = [rows["full_prefill", "none", 1.0]["f1"] for rows in quality("quality_default_cpu.json").values()]
    assert f"was at most {max(first):.2f} in full prefill" in prose(PAGE)


def test_first_ask() -> None:
    found, text = record("first_ask_cpu.json"), prose(PAGE)
    assert f"{found['files']} Markdown files ({found['chunks']} chunks, {found['tokens']:,} tokens)" in text
    assert f"{found['askable_s']:.1f} s after" in text
    assert f"{found['bare_whole_s']:.1f} s to start" in text


def test_the_first_token_comes_about_as_soon_as_before() -> None:
    half, single, sums = (
        record(f"ttft_before{name}_cpu.json")["now_over_before"] for name in ("_bfloat16", "", "_sums")
    )
    text = prose(PAGE)
    assert f"after {half:.2f} times as long as in an earlier version in bfloat16" in text
    assert f"after {single:.2f} times as long in float32" in text
    assert f"are {sums - 1:.2f} of that" in text
    assert half <= 1.03


def test_the_second_pass_today() -> None:
    names = {"float32": "float32_attention", "bfloat16": "bfloat16_sums", "AVX2": "avx2"}
    of = {way: record(f"second_pass_{name}_cpu.json") for way, name in names.items()}
    ratios = {way: one["total_over_first"]["bfloat16" if way == "bfloat16" else "float32"] for way, one in of.items()}
    want = [[prompts, *(f"{ratios[way][prompts]:.2f}" for way in of)] for prompts in ("1", "2")]
    assert table("docs/ingestion.md", "`preprocessing_prompts`") == want
    readme, ingestion = prose(PAGE), prose("docs/ingestion.md")
    chunks = [{run["chunks"] for run in one["runs"]} for one in of.values()]
    assert chunks == [{240}, {240}, {96}]
    single, half, slow = want[1][1:]
    assert f"ingesting 240 passages takes {half} times as long as without it in bfloat16" in readme
    assert f"and {single} times in float32" in readme
    assert f"with AVX2 alone {slow} times in float32 (96 passages" in readme
    for name in ("bfloat16_sums", "avx2"):
        for prompts in (1, 2):
            runs = second_passes(name, prompts)
            assert len(runs) == 3
            assert f"{runs[0]:.2f} to {runs[-1]:.2f}" in ingestion
