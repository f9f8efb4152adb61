"""A long batch says on a terminal how far it is."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.adapter import batch_progress
from langchain_fused_kv import ChatFusedKV, FusedKVLLM


@pytest.fixture(params=[True, False], ids=["terminal", "file"])
def shown(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, io.StringIO]:
    """Whether the output is a terminal, and what was written to it."""
    written = io.StringIO()
    console = Console(file=written, force_terminal=request.param, width=100)
    monkeypatch.setattr("fused_kv_llm.adapter.progress.Console", lambda **options: console)
    return request.param, written


@pytest.mark.parametrize("kind", [FusedKVLLM, ChatFusedKV])
def test_a_terminal_shows_how_many_are_answered(
    engine: FusedKVEngine, kind: Any, prompts: list[str], shown: tuple[bool, io.StringIO]
) -> None:
    is_terminal, written = shown
    llm = kind.from_engine(engine, max_tokens=2)
    llm.batch(prompts)
    assert written.getvalue() == ""
    llm.batch(prompts * 2)
    asyncio.run(llm.abatch(prompts * 2, {"max_concurrency": 4}))
    assert written.getvalue().count("8/8") >= 2 if is_terminal else written.getvalue() == ""


def test_a_batch_inside_another_is_not_shown_twice(shown: tuple[bool, io.StringIO]) -> None:
    is_terminal, written = shown
    with batch_progress(20), batch_progress(9):
        pass
    assert ("0/20" in written.getvalue()) == is_terminal
    assert "0/9" not in written.getvalue()
