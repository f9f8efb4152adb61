"""Whose turn it is: between tenants, and between a prompt that begins and answers that are being written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from waiting import wait_until

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.serving.served_request import ServedRequest

OPTIONS: dict[str, Any] = {"dtype": "float32", "preprocessing": "none"}


def test_a_tenant_is_charged_the_tokens_of_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, begin = list[str](), ServedRequest.begin

    def noted(self: ServedRequest) -> None:
        begun.append(self.home.tenant)
        begin(self)

    monkeypatch.setattr(ServedRequest, "begin", noted)
    model, long_prompt = tiny_model(), rag_prompt(SHORT[:8])
    options = {**OPTIONS, "kv_dir": tmp_path, "tokenizer": smollm2_tokenizer(), "max_num_seqs": 1}
    with (
        FusedKVEngine(model, tenant="long", **options) as long,
        FusedKVEngine(model, tenant="short", **options) as short,
    ):
        with long.model_lock:
            handles = [long.submit(long_prompt, max_tokens=2) for _ in range(10)]
            handles += [short.submit("Which ferry is the largest?", max_tokens=2) for _ in range(10)]
        for handle in handles:
            handle.result()
    # Answers are as long, prompts are not: four that were planned go before, then the short ones, which cost little.
    last_short = len(begun) - begun[::-1].index("short")
    assert begun[:last_short].count("long") <= 6


def test_a_request_that_begins_waits_a_step_while_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, begin, part = list[tuple[str, ServedRequest]](), ServedRequest.begin, ServedRequest.part

    def noted_begin(self: ServedRequest) -> None:
        events.append(("begin", self))
        begin(self)

    def noted_part(self: ServedRequest, max_rows: int | None) -> Any:
        events.append(("part", self))
        return part(self, max_rows)

    monkeypatch.setattr(ServedRequest, "begin", noted_begin)
    monkeypatch.setattr(ServedRequest, "part", noted_part)
    with FusedKVEngine(tiny_model(), kv_dir=tmp_path, tokenizer=smollm2_tokenizer(), **OPTIONS) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        running = engine.submit(rag_prompt(SHORT[:3]), max_tokens=1500)
        running.wait_for_first()
        begins = engine.submit(rag_prompt(SHORT[:3]), max_tokens=2)
        begins.wait_for_first()
        running.cancel()
        begins.result()
        wait_until(lambda: running.done)
    first, second = (request for kind, request in events if kind == "begin")
    since = [request for kind, request in events[events.index(("begin", second)) + 1 :] if kind == "part"]
    # Its probe was what it had of this step; its first slice comes after the token that the other gets in the next.
    assert since[: since.index(second)] == [first, first]
