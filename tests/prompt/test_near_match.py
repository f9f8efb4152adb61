"""Texts that are not in a prompt verbatim are found in it, and what was done to them is named."""

from __future__ import annotations

import html
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.prompt import SearchedText, difference

TEXT = 'The ferry leaves at nine.\nIt carries "412" people & 96 cars. ' + " ".join(
    f"Sentence {number} has words of its own, as {number * 7} shows." for number in range(12)
)


def change(prompt: str, text: str = TEXT) -> str | None:
    found = SearchedText(prompt).find(text)
    return None if found is None else found.change


@pytest.mark.parametrize(
    ("prompt", "want"),
    [
        (f"Context: {[TEXT]}", "escaped"),
        (f"Context: {json.dumps([TEXT])}", "escaped"),
        (f"Context: {html.escape(TEXT)} Question?", "escaped"),
        (f"Context: {TEXT.replace(chr(10), ' ')} Question?", "respaced"),
        (f"Context: {TEXT[:200]}... Question?", "shortened"),
        (f"Context: ...{TEXT[300:]} Question?", "shortened"),
        (f"Context: {TEXT[:200]} [...] {TEXT[-200:]} Question?", "shortened"),
        (f"Context: {TEXT.replace('Sentence 5 has words', 'Sentence V has a word')} Question?", "rewritten"),
        ("Nothing of the kind is here.", None),
    ],
)
def test_what_was_done_is_named(prompt: str, want: str | None) -> None:
    assert change(prompt) == want


@settings(max_examples=50)
@given(
    words=st.lists(st.text("abcdefgh", min_size=3, max_size=8), min_size=8, max_size=40),
    spaces=st.lists(st.sampled_from([" ", "\n", "\t ", "  "]), min_size=40, max_size=40),
    before=st.text("xyz \n", max_size=60),
    after=st.text("xyz \n", max_size=60),
)
def test_the_place_of_a_respaced_text_is_exact(words: list[str], spaces: list[str], before: str, after: str) -> None:
    shown = "".join(word + space for word, space in zip(words, spaces, strict=False)).strip()
    text = " ".join(words)
    if shown == text:
        return
    found = SearchedText(before + shown + after).find(text)
    assert found is not None
    assert (found.change, found.found) == ("respaced", shown)


def test_few_characters_are_not_looked_for() -> None:
    assert change("so it is as of now, a b c d", "a  b  c  d" + " " * 40) is None


def test_a_difference_is_short() -> None:
    lines = difference(TEXT * 20, TEXT.upper() * 20).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 160
    assert difference(TEXT, TEXT) == ""
    assert difference("one.\ntwo", "one. two").splitlines()[3:] == ["-one.\\n", "+one. "]
