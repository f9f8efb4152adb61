from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.prompt import WINDOW, ContentIndex, Match, content_hash, is_indexable
from fused_kv_llm.prompt.cover import best_cover
from fused_kv_llm.prompt.texthash import SpanHashes

TextOf = Callable[[Sequence[str]], Mapping[str, str]]


def lookup(texts: Mapping[str, str]) -> TextOf:
    return lambda keys: {key: texts[key] for key in keys if key in texts}


class NamedIndex:
    """A content index whose chunks have names: its own numbers mean nothing to a reader."""

    def __init__(self) -> None:
        self.index = ContentIndex()
        self.numbers: dict[str, int] = {}
        self.names: dict[int, str] = {}

    def number(self, name: str) -> int:
        if name not in self.numbers:
            self.numbers[name] = 7 * len(self.numbers) + 1
            self.names[self.numbers[name]] = name
        return self.numbers[name]

    def add_all(self, texts: Mapping[str, str]) -> None:
        hashes = [content_hash(text) for text in texts.values()]
        columns = [[h.prefix for h in hashes], [h.full for h in hashes], [h.length for h in hashes]]
        self.index.add([self.number(name) for name in texts], *columns)

    def remove(self, names: Iterable[str]) -> None:
        self.index.remove([self.number(name) for name in names])

    def find(self, text: str, text_of: TextOf) -> list[Match]:
        def text_of_number(numbers: Sequence[int]) -> dict[int, str]:
            found = text_of([self.names[number] for number in numbers])
            return {self.numbers[name]: chunk for name, chunk in found.items()}

        return [Match(self.names[number], start, end) for number, start, end in self.index.find(text, text_of_number)]


def index_of(texts: Mapping[str, str]) -> NamedIndex:
    index = NamedIndex()
    index.add_all(texts)
    return index


def occurrences(text: str, chunks: Mapping[str, str]) -> list[tuple[int, int]]:
    spans = set()
    for chunk in chunks.values():
        at = text.find(chunk)
        while at >= 0:
            spans.add((at, at + len(chunk)))
            at = text.find(chunk, at + 1)
    return sorted(spans)


def test_span_hashes_depend_on_the_characters_alone() -> None:
    text = "añ\U0001f600\udc80b" * 5 + "tail"
    hashes = SpanHashes("prefix" + text + "suffix" + text)
    for start, length in [(0, 1), (3, 20), (7, 22)]:
        span = SpanHashes(text[start : start + length]).spans([0], [length])
        assert hashes.spans([6 + start, 12 + len(text) + start], [length, length]).tolist() == [
            span[0],
            span[0],
        ]


@given(st.text(max_size=40), st.text(max_size=40))
def test_different_texts_hash_differently(a: str, b: str) -> None:
    hashes = [int(SpanHashes(text).spans([0], [len(text)])[0]) for text in (a, b)]
    assert (hashes[0] == hashes[1]) == (a == b)


def test_null_characters_count() -> None:
    # Equal lengths only: a text's length is compared beside its hash.
    assert content_hash("\0" + "a" * 40) != content_hash("a" * 40 + "\0")
    assert content_hash("\0" * 40) != content_hash("\0" * 39 + "a")


def test_hashes_are_part_of_the_file_format() -> None:
    # A change of these numbers makes every stored chunk unfindable: raise chunk.FORMAT_VERSION with it.
    found = content_hash("The quick brown fox jumps over the lazy dog. Früh übt sich 😀")
    assert (found.prefix, found.full, found.length) == (5241580296122562437, 2040818359514342333, 60)


def test_short_texts_cannot_be_indexed() -> None:
    assert not is_indexable("x" * (WINDOW - 1))
    assert is_indexable("x" * WINDOW)
    with pytest.raises(ConfigError, match="31 characters"):
        content_hash("x" * (WINDOW - 1))


@settings(max_examples=200)
@given(st.data())
def test_find_equals_the_brute_force_search(data: st.DataObject) -> None:
    # Few distinct blocks, so that chunks overlap, contain each other and share their beginnings.
    blocks = [c * WINDOW for c in "ab"] + ["xyz", "é😀\r\n", "\udcff"]
    pieces = st.lists(st.sampled_from(blocks), max_size=6).map("".join)
    stored = data.draw(st.lists(pieces.filter(is_indexable), max_size=6, unique=True))
    text = data.draw(st.lists(st.one_of(pieces, st.sampled_from(stored or [""])), max_size=5).map("".join))
    chunks = {f"k{i}": chunk for i, chunk in enumerate(stored)}
    matches = index_of(chunks).find(text, lookup(chunks))
    everywhere = occurrences(text, chunks)
    best = [everywhere[i] for i in best_cover(everywhere)]
    assert all(text[m.start : m.end] == chunks[m.key] for m in matches)
    assert all(a.end <= b.start for a, b in itertools.pairwise(matches))
    assert sum(m.end - m.start for m in matches) == sum(end - start for start, end in best)
    assert len(matches) == len(best)


def test_a_chunk_twice_and_chunks_without_separator() -> None:
    chunks = {"a": "first chunk " * 5, "b": "second chunk " * 5}
    text = chunks["a"] + chunks["b"] + chunks["a"]
    ends = [0, 60, 125, 185]
    found = index_of(chunks).find(text, lookup(chunks))
    assert found == [Match(k, s, e) for k, s, e in zip("aba", ends[:-1], ends[1:], strict=True)]


def test_the_longer_of_two_nested_chunks_wins() -> None:
    inner = "the inner chunk, long enough to be indexed"
    chunks = {"inner": inner, "outer": f"before {inner} after"}
    assert [m.key for m in index_of(chunks).find(f"{chunks['outer']}\n{inner}", lookup(chunks))] == [
        "outer",
        "inner",
    ]


def test_hashes_alone_are_not_believed() -> None:
    text = "what the hashes were computed from, once"
    index = index_of({"changed": text, "gone": text})
    assert index.find(text, lookup({"changed": text[:-1] + "!"})) == []
    assert [m.key for m in index.find(text, lookup({"changed": "?", "gone": text}))] == ["gone"]


def test_text_of_is_not_called_without_need() -> None:
    def refuse(keys: Sequence[str]) -> Mapping[str, str]:
        raise LookupError(keys)

    index = index_of({"a": "x" * 40})
    assert index.find("y" * 100, refuse) == []
    assert index.find("short", refuse) == []
    assert ContentIndex().find("y" * 100, refuse) == []
    with pytest.raises(LookupError):
        index.find("x" * 40, refuse)


def test_arrays_must_be_parallel() -> None:
    with pytest.raises(ConfigError, match="2 chunks"):
        ContentIndex().add([1, 2], [1, 2], [3, 4], [40])


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("arf"), st.sets(st.integers(0, 30), max_size=12)), max_size=25))
def test_any_order_of_additions_and_removals(steps: list[tuple[str, set[int]]]) -> None:
    texts = {f"k{i}": f"chunk number {i:02d} " + "z" * (20 + i) for i in range(31)}
    prompt = "|".join(texts.values())
    index, model = NamedIndex(), set()
    for step, numbers in steps:
        keys = [f"k{i}" for i in sorted(numbers)]
        if step == "a":
            index.add_all({key: texts[key] for key in keys})
            model.update(keys)
        elif step == "r":
            index.remove(keys)
            model.difference_update(keys)
        else:
            assert {m.key for m in index.find(prompt, lookup(texts))} == model
    assert {m.key for m in index.find(prompt, lookup(texts))} == model


def test_repeated_additions_are_kept_once() -> None:
    texts = {f"k{i}": f"{i:04d} " * 10 for i in range(100)}
    index = NamedIndex()
    for _ in range(600):
        index.add_all(texts)
    index.find("x" * 50, lookup(texts))
    index.add_all(texts)
    index.find("x" * 50, lookup(texts))
    assert len(index.index) == 100
    index.remove(list(texts))
    assert len(index.index) == 0
    assert index.find(texts["k7"], lookup(texts)) == []


def test_search_while_others_add_and_remove() -> None:
    texts = {f"k{i}": f"{i:04d} steady " * 8 for i in range(400)}
    kept = {key: texts[key] for key in list(texts)[:50]}
    index = index_of(kept)
    prompt = "\n".join(kept.values())
    stop = threading.Event()
    errors: list[BaseException] = []

    def churn(keys: list[str]) -> None:
        try:
            while not stop.is_set():
                for key in keys:
                    index.add_all({key: texts[key]})
                index.remove(keys)
        except BaseException as error:
            errors.append(error)

    others = list(texts)[50:]
    threads = [threading.Thread(target=churn, args=(others[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(30):
            assert [m.key for m in index.find(prompt, lookup(texts))] == list(kept)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


WORDS = ["".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz", k=2 + i % 8)) for i in range(2000)]


@pytest.fixture(scope="module", params=["distinct", "same first 200 characters"])
def many_chunks(request: pytest.FixtureRequest) -> dict[str, str]:
    rng = random.Random(1)
    header = " ".join(rng.choices(WORDS, k=60))[:200] if request.param.startswith("same") else ""
    return {f"{i:064x}": header + " ".join(rng.choices(WORDS, k=40 + i % 100)) for i in range(100_000)}


def test_hundred_thousand_chunks_are_searched_within_20_ms(many_chunks: dict[str, str]) -> None:
    rng = random.Random(2)
    index = index_of(many_chunks)
    wanted = rng.sample(list(many_chunks), 20)
    body = "\n\n".join(many_chunks[key] for key in wanted)
    prompt = (body + "\n\n" + " ".join(rng.choices(WORDS, k=8000)))[:32_000]
    assert len(body) < len(prompt) == 32_000
    best_s = float("inf")
    for _ in range(8):
        started = time.perf_counter()
        matches = index.find(prompt, lookup(many_chunks))
        best_s = min(best_s, time.perf_counter() - started)
        assert [m.key for m in matches] == wanted
    assert best_s < 0.020


def test_memory_of_an_index(many_chunks: dict[str, str]) -> None:
    index = index_of(many_chunks)
    index.find("x" * 50, lookup(many_chunks))
    columns = ("numbers", "prefix", "full", "length", "heads", "first", "lengths")
    nbytes = sum(np.asarray(getattr(table, name)).nbytes for table in index.index._tables for name in columns)
    assert nbytes <= 44 * (len(many_chunks) + 1)


def test_a_prefix_that_recurs_everywhere_is_searched_in_bounded_memory() -> None:
    texts = {f"k{i}": "-" * 64 + f"{i:05d}" * (1 + i % 300) for i in range(3000)}
    prompt = "-" * 20_000 + texts["k2999"] + "-" * 1000
    matches = index_of(texts).find(prompt, lookup(texts))
    assert [m.key for m in matches] == ["k2999"]
