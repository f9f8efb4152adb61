"""Which tokens belong to the same number."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.online.numbers import numbers_in


def spans_of(*tokens: str) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    ends = np.cumsum([len(token) for token in tokens])
    return np.stack((ends - [len(token) for token in tokens], ends), axis=1).astype(np.int64)


def test_numbers_by_hand() -> None:
    tokens = ["On", " ", "1", " May", " ", "1", "9", "7", "3", ",", " 2", "73", ",", "2", "8", "2", " boxes", "."]
    found = numbers_in("".join(tokens), spans_of(*tokens)).tolist()
    assert found == [-1, -1, 0, -1, -1, 1, 1, 1, 1, -1, 2, 2, 2, 2, 2, 2, -1, -1]


def test_a_text_without_numbers_or_without_tokens() -> None:
    assert numbers_in("no number", spans_of("no", " number")).tolist() == [-1, -1]
    assert numbers_in("", np.zeros((0, 2), dtype=np.int64)).tolist() == []
    assert numbers_in("12", np.array([[0, 0], [0, 1], [0, 0], [1, 2], [2, 2]])).tolist() == [-1, 0, -1, 0, -1]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("3,141,592.65", 1),
        ("3,5,2,1,9,12", 3),
        ("10.0.0.1", 2),
        ("1, 2, 3", 3),
        ("1" * 24, 1),
        ("1" * 25, 0),
        ("1,234" + ",567" * 10, 0),
    ],
)
def test_lists_and_endless_digits_are_not_one_number(text: str, numbers: int) -> None:
    found = set(numbers_in(text, spans_of(*text)).tolist()) - {-1}
    assert len(found) == numbers


@given(st.lists(st.text("0123.,a ", min_size=1, max_size=4), max_size=30))
def test_a_token_belongs_to_the_first_number_that_it_touches(tokens: list[str]) -> None:
    text = "".join(tokens)
    numbers = [
        match.span() for match in re.finditer(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:[.,]\d+)?", text)
        if len(match[0]) <= 24
    ]  # fmt: skip
    for (start, stop), number in zip(spans_of(*tokens), numbers_in(text, spans_of(*tokens)).tolist(), strict=True):
        touched = [index for index, (first, last) in enumerate(numbers) if first < stop and last > start]
        assert number == (touched[0] if touched else -1)
