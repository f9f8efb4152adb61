"""Words and numbers of an answer that its chunks do not hold are found, and no others."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.report import lexical_support

CHUNK = "The lighthouse on Ulvane Point is 38 metres high; its ferries carried 1,874 people in the keeper's year."


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        ("The lighthouse is 38 metres high.", []),
        ("It's 39 metres high.", ["39"]),
        ("A LIGHTHOUSE of granite, on Ulvane Point", ["granite"]),
        ("A ferry carried 1874 people.", []),
        ("A ferry carried 1.874 people.", ["1.874"]),
        ("The keepers' houses", ["houses"]),
        ("Yes, it was.", []),
        ("", []),
    ],
)
def test_what_no_chunk_holds_is_marked(answer: str, missing: list[str]) -> None:
    found = lexical_support(answer, [CHUNK])
    assert [span.text for span in found.spans] == missing
    assert all(answer[span.start : span.end] == span.text for span in found.spans)


@given(st.text(max_size=200), st.lists(st.text(max_size=100), max_size=4))
def test_a_text_supports_itself_and_more_text_never_supports_less(answer: str, chunks: list[str]) -> None:
    assert lexical_support(answer, [*chunks, answer]).spans == []
    without, with_one = lexical_support(answer, chunks), lexical_support(answer, [*chunks, CHUNK])
    assert set(with_one.spans) <= set(without.spans)
    assert 0.0 <= without.share <= with_one.share <= 1.0


def test_hostile_texts_take_no_longer_than_others() -> None:
    took_s = []
    for text in ("1," * 100_000, "a'" * 100_000, "1,111" * 40_000, "word " * 40_000):
        # The processor's time: a machine that stands still for a second says nothing of the function.
        started_s = time.thread_time()
        lexical_support(text, [text])
        took_s.append(time.thread_time() - started_s)
    assert max(took_s) < 2.0
