"""Chunks without KV are remembered until a prompt contains them, the newest of too many."""

from __future__ import annotations

import pytest

from fused_kv_llm.offline import expected_chunks
from fused_kv_llm.offline.expected_chunks import ExpectedChunks


def test_a_prompt_takes_what_it_contains() -> None:
    expected = ExpectedChunks()
    expected.add(["the sea", "the moon", ""])
    assert expected.take("Of the sea and the sun.") == ["the sea"]
    assert expected.take("Of the sea and the moon.") == ["the moon"]
    assert expected.take("Of the sea and the moon.") == []


def test_what_is_forgotten_is_not_taken() -> None:
    expected = ExpectedChunks()
    expected.add(["one", "two"])
    expected.forget(["one", "three"])
    assert expected.take("one two three") == ["two"]


def test_the_oldest_of_too_many_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected_chunks, "_MOST_TEXTS", 2)
    expected = ExpectedChunks()
    expected.add(["one", "two"])
    # Expected once more, it is the newest.
    expected.add(["one"])
    expected.add(["three"])
    assert expected.take("one two three") == ["one", "three"]
