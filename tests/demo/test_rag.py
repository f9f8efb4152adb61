"""Prompts from retrieved passages, and a prompt answered in several ways; with a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import MiniLM, PassageIndex, Rag, compare
from fused_kv_llm.demo.passages import Passage

TEXTS = [
    "The lighthouse on Ulvane Point was built in 1874 and stands 38 metres high. " * 4,
    "Dogs travel free of charge on every ferry, but they stay on a lead at all times. " * 4,
    "The harbour office at Skeldra opens at 06:30 and closes at 22:00 on every weekday. " * 4,
]
QUESTION = "How high is the lighthouse?"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    kv_dir = tmp_path_factory.mktemp("kv")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=kv_dir, preprocessing="none") as made:
        made.build_kv_cache(TEXTS, progress=False)
        yield made


@pytest.fixture(scope="module")
def index(engine: FusedKVEngine) -> PassageIndex:
    passages = [Passage(text.strip(), "notes.txt") for text in TEXTS]
    return PassageIndex.update(engine.store.kv_dir, passages, model="tiny", dtype="float32", embedder=MiniLM())


def test_the_nearest_passage_stands_next_to_the_question(engine: FusedKVEngine, index: PassageIndex) -> None:
    prompt = Rag(index, engine, k=2, max_tokens=8).prompt(QUESTION)
    assert prompt.sources[0].text == TEXTS[0].strip()
    places = [prompt.text.index(source.text) for source in prompt.sources]
    assert places == sorted(places, reverse=True)
    assert prompt.text.index(QUESTION) > max(places)
    assert engine.generate(prompt.text, max_tokens=1).report.chunks_found == 2


def test_fewer_passages_where_the_context_holds_no_more(engine: FusedKVEngine, index: PassageIndex) -> None:
    assert len(Rag(index, engine, k=3, max_tokens=8).prompt(QUESTION).sources) == 3
    prompt = Rag(index, engine, k=3, max_tokens=engine.context_length - 300).prompt(QUESTION)
    assert [source.text for source in prompt.sources] == [TEXTS[0].strip()]
    assert prompt.passages_wanted == 3


def test_every_way_has_its_times_and_stops_alike(engine: FusedKVEngine, index: PassageIndex) -> None:
    prompt = Rag(index, engine, k=3, max_tokens=8).prompt(QUESTION).text
    plain, exact, fused, reuse = compare(engine, prompt, ratios=(1.0, 0.3, 0.0), max_tokens=8)
    assert plain.answer == exact.answer != ""
    assert (plain.cold_s, exact.cold_s) == (None, None)
    assert fused.cold_s is not None
    assert reuse.cold_s is not None
    assert plain.computed_tokens == plain.prompt_tokens
    assert exact.computed_tokens > fused.computed_tokens > reuse.computed_tokens
    letter = next(letter for letter in plain.answer[1:] if letter != plain.answer[0])
    stopped = compare(engine, prompt, ratios=(1.0,), max_tokens=8, stop=(letter,))
    assert [row.answer for row in stopped] == [plain.answer[: plain.answer.index(letter)]] * 2


def test_cold_is_read_from_the_disk_and_warm_from_memory(
    engine: FusedKVEngine, index: PassageIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = []
    generate = engine.generate

    def recorded(*args: object, **options: object) -> object:
        made = generate(*args, **options)  # type: ignore[arg-type]
        tiers.append({tier for tier, nbytes in made.report.bytes_loaded.items() if nbytes})
        return made

    monkeypatch.setattr(engine, "generate", recorded)
    compare(engine, Rag(index, engine, k=3, max_tokens=8).prompt(QUESTION).text, ratios=(0.3,), max_tokens=2)
    assert tiers == [{"disk"}, {"memory"}]
