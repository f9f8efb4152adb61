"""Figures in docs/serving.md are those of the records."""

from __future__ import annotations

from .records import prose, record, table

PAGE = "docs/serving.md"


def test_the_order_of_chunks() -> None:
    found = record("chunk_order_cpu.json")
    want = []
    for key, row in found["served"].items():
        order, ratio = key.split("/")
        tokens = f"{row['prefix_cache_tokens']:.0f} of {row['prompt_tokens']:,.0f}"
        name = {"given": "as ranked", "ordered": "reordered"}[order]
        want.append([f"{ratio}, {name}", tokens, f"{row['computed_tokens']:,.0f}", f"{row['ttft_s']:.2f} s"])
    assert table(PAGE, "ratio, order") == want
    text = prose(PAGE)
    given, moved = found["judged"]["given"], found["judged"]["ordered"]
    assert f"passages of {found['moved']} of {found['questions']} questions" in text
    assert f"the first {found['served_questions']} questions" in text
    assert f"over {found['judged_questions']} questions whose passages were moved" in text
    assert f"is {moved['kl']:.3f} on the gold answer" in text
    assert f"goes from {given['gold_nll']:.2f} to {moved['gold_nll']:.2f}" in text
    assert f"and F1 from {given['f1']:.2f} to {moved['f1']:.2f}" in text


def test_requests_at_once() -> None:
    found = record("serving_cpu.json")
    rate = {(row["system"], row["load"], row["at_once"]): f"{row['tokens_per_s']:.0f}" for row in found["rows"]}
    text = prose(PAGE)
    prompts, gaps = found["prompt_tokens"], found["gaps"]["fused"]
    assert f"{min(prompts['prompt']):,} to {max(prompts['prompt']):,} tokens" in text
    alone, eight, sixteen = (rate["fused", "closed", at_once] for at_once in (1, 8, 16))
    assert (
        f"at {alone} answer tokens a second one after another, at {eight} with 8 at once and at {sixteen} with 16"
        in text
    )
    assert f"one after another, at {rate['plain', 'closed', 1]}." in text
    assert f"wrote {rate['fused', 'short', 8]} tokens a second" in text
    held_up = (
        f"A prompt of {prompts['long']:,} tokens held seven running answers up for {gaps['beside']['gap_max_s']:.2f} s"
    )
    assert held_up in text
    assert f"every {gaps['alone']['gap_p50_s']:.2f} s without it" in text
    peer = record("serving_vllm_cpu.json")
    at_once, short = (f"{row['tokens_per_s']:.0f}" for row in peer["rows"])
    assert f"without prefix hits: {at_once} tokens a second with 8 at once, {short} with 8 short prompts" in text
    assert f"held up for {peer['gaps']['vllm']['beside']['gap_max_s']:.2f} s (`serving_vllm_cpu.json`)" in text
