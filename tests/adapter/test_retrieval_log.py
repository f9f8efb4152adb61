"""Retrieved texts that the LLM expects in its prompts, without a model."""

from __future__ import annotations

import json
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.adapter.retrieval_log import RetrievalLog, explain_mismatch

A = 'The ferry leaves at nine.\nIt is called "Aldebaran" & carries <412> people.'
B = "Route 2 leads to Skeldra harbour, where the breakwater is 310 metres long and the quay is narrow."


def test_a_prompt_that_contains_everything_is_fine() -> None:
    log = RetrievalLog()
    log.add([A, f"  {B}\n"])
    check = log.check(f"Context:\n{A}\n\n{B}\n\nQuestion?")
    assert (check.unmatched, check.explanation) == ([], None)


def test_missing_ones_are_listed_but_not_explained_while_others_are_there() -> None:
    log = RetrievalLog()
    log.add([A, B])
    check = log.check(f"{A}\nQuestion?")
    assert check.unmatched == [B[:80]]
    assert check.explanation is None


def test_a_prompt_without_any_is_explained_once() -> None:
    log = RetrievalLog()
    log.add([A, B])
    assert log.check("Rephrase the question").explanation is not None
    assert log.check("Rephrase the question").explanation is None


def test_nothing_retrieved_means_nothing_to_say() -> None:
    log = RetrievalLog()
    log.add([])
    log.add(["", "  \n"])
    assert log.check("Hello").explanation is None


def test_a_settled_retrieval_does_not_disturb_a_later_call_without_chunks() -> None:
    log = RetrievalLog()
    log.add([A])
    log.check(f"{A} Question?")
    assert log.check("Rephrase: and how long?").explanation is None


def test_prompts_of_a_batch_find_their_own_retrieval_although_they_share_texts() -> None:
    texts = [f"Passage {letter} is long enough to be found in a prompt." for letter in "abcd"]
    log = RetrievalLog()
    retrievals = [texts[0:3], texts[1:4], [texts[0], texts[3]]]
    for retrieved in retrievals:
        log.add(retrieved)
    for retrieved in retrievals:
        check = log.check("\n\n".join(retrieved))
        assert (check.unmatched, check.explanation) == ([], None)


def test_old_retrievals_are_forgotten() -> None:
    log = RetrievalLog(limit=2)
    for number in range(5):
        log.add([f"text number {number}"])
    assert log.check("text number 3").unmatched == []
    assert [log.check(f"text number {number}").explanation for number in range(3)] == [None] * 3
    assert log.check("something else").explanation is not None


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (f"Context: {[A]}", "line breaks escaped"),
        (json.dumps({"context": A}), "line breaks escaped"),
        (
            A.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;"),
            "mustache",
        ),
        (" ".join(A.split()), "white space"),
        (f"{B[:60]}...", "shorten"),
        ("Hello", "likely causes"),
    ],
)
def test_the_cause_is_recognised(prompt: str, words: str) -> None:
    assert words in explain_mismatch(prompt, [A, B])


PASSAGES = [f"Passage {number} of the handbook." for number in range(6)]


@given(
    st.lists(st.lists(st.sampled_from(PASSAGES), min_size=1, max_size=4), max_size=6).flatmap(
        lambda retrievals: st.tuples(st.just(retrievals), st.permutations(retrievals))
    )
)
def test_verbatim_prompts_never_raise_an_alarm(pair: tuple[list[list[str]], list[list[str]]]) -> None:
    retrieved, asked = pair
    log = RetrievalLog()
    for texts in retrieved:
        log.add(texts)
    for texts in asked:
        check = log.check("\n\n".join(texts))
        assert (check.unmatched, check.explanation) == ([], None)


def test_many_threads() -> None:
    log = RetrievalLog(limit=1000)
    explained: list[str] = []

    def work(number: int) -> None:
        for step in range(50):
            text = f"passage {number}/{step}."
            log.add([text])
            check = log.check(f"Context: {text} Question?")
            if check.unmatched:
                explained.extend(check.unmatched)

    threads = [Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert explained == []


def test_a_check_says_what_the_prompt_should_contain() -> None:
    log = RetrievalLog()
    log.add([A, B])
    assert log.check(f"{A}\nQuestion?").texts == (A, B)
    log.add([B])
    assert log.check("Rephrase the question").texts == (B,)
    assert log.check("Hello").texts == ()


def test_a_prompt_without_any_of_several_retrievals_is_given_none_of_them() -> None:
    log = RetrievalLog()
    log.add([A])
    log.add([B])
    assert log.check("Somebody else's prompt").texts == ()
