"""Questions that a model writes: what is thrown out, what the demonstration's model makes of it, and what stands in."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from corpus import PASSAGES, SHORT
from models import smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_llm import FusedKVEngine, FusionReport, Generation
from fused_kv_llm.decoding import Constraint, end_token_ids
from fused_kv_llm.offline import retriever_of
from fused_kv_llm.prompt import RawPrompt
from fused_kv_llm.tuning import calibrate
from fused_kv_llm.tuning.written_questions import fault_of, made_questions

CHUNK = "The Aldebaran is the largest ferry of the fleet. She carries 412 passengers from Skeldra to Ulvane."


@pytest.fixture(scope="module")
def engine() -> Iterator[FusedKVEngine]:
    with (
        tempfile.TemporaryDirectory() as folder,
        FusedKVEngine("smollm2-135m", kv_dir=folder, preprocessing="none", store_misses=False) as engine,
    ):
        yield engine


@pytest.mark.parametrize(
    ("question", "fault"),
    [
        ("How many passengers does the Aldebaran carry?", None),
        ("Where is Skeldra?", None),
        ("How many passengers does the Aldebaran carry", "no question"),
        ("The Aldebaran carries passengers, doesn't she?", "no question"),
        ("What is the Aldebaran?\nAnswer: a ferry?", "no question"),
        ("", "no question"),
        ("Who?", "no question"),
        ("What ferry?", "length"),
        ("What is the ferry " + "of the fleet " * 9 + "?", "length"),
        ("What is the largest ferry of the largest ferry of the fleet?", "repeats itself"),
        ("What is the title of this passage on the Aldebaran?", "points at the text"),
        ("When did the railway to the moon open?", "not of the chunk"),
        ("What is it?", "not of the chunk"),
    ],
)
def test_what_is_thrown_out(question: str, fault: str | None) -> None:
    assert fault_of(question, CHUNK) == fault


def test_a_small_model_writes_questions_that_find_their_chunk(engine: FusedKVEngine, tmp_path: Path) -> None:
    chunks = SHORT[:12]
    search = retriever_of(chunks, tmp_path)
    made = made_questions(engine, chunks, 2, search)
    assert made.written == len(made.asked) == 2
    assert len({chunk for _, chunk in made.asked}) == 2
    for question, chunk in made.asked:
        assert fault_of(question, chunk) is None
        assert chunk in search(question, 3)
        assert question not in ("Where does the Sava join the Danube?", "When was penicillin discovered?")
    assert made.description == "2 written by the model"
    assert made_questions(engine, chunks, 1, search).asked == made.asked[:1], "more questions begin with the same ones"


def test_a_question_whose_search_finds_others_is_thrown_out(engine: FusedKVEngine) -> None:
    made = made_questions(engine, SHORT[:2], 2, lambda question, count: [SHORT[0]])
    assert made.written <= 1, "only the first chunk is ever found"
    assert made.faults["other chunks are found"] > 0
    assert len(made.asked) == 2
    assert 'How does this go on: "' in made.asked[-1][0]


def test_a_model_that_writes_none_for_ten_chunks_is_not_asked_for_more(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "generate", lambda *args, **options: Generation("", [], "length", FusionReport()))
    made = made_questions(engine, PASSAGES[:30], 20, lambda question, count: PASSAGES)
    assert (made.written, made.chunks_tried) == (0, 10)
    assert len(made.asked) == 20


def test_nothing_but_a_question_mark_ends_a_question(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = sorted(end_token_ids(engine.loaded))
    seen: list[Tensor] = []

    def generate(prompt: RawPrompt, *, constraint: Constraint, **options: object) -> Generation:
        assert options["stop"] == "?"
        logits = torch.zeros(49152)
        logits[ends] = 9.0
        seen.append(constraint([1], logits))
        return Generation(" are Skeldra and Ulvane", [1], "stop", FusionReport())

    monkeypatch.setattr(engine, "generate", generate)
    made = made_questions(engine, [CHUNK], 1, lambda question, count: [CHUNK])
    assert made.asked[0][0].endswith(" are Skeldra and Ulvane?")
    assert all(logits.argmax().item() not in ends for logits in seen)


def test_a_chunk_that_is_longer_than_the_context_is_cut(engine: FusedKVEngine, tmp_path: Path) -> None:
    chunk = " ".join([CHUNK] * 400)
    assert engine.encode(chunk)
    assert len(engine.encode(chunk)) > 8192
    made = made_questions(engine, [chunk], 1, retriever_of([chunk], tmp_path))
    assert len(made.asked) == 1


def test_a_model_that_writes_none_leaves_it_to_quoting_and_it_is_reported(tmp_path: Path) -> None:
    """Random weights write no questions."""
    tiny = FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, preprocessing="none", store_misses=False
    )
    with tiny as engine:
        engine.build_kv_cache(SHORT[:2], progress=False)
        result = calibrate(engine, ratios=(0.3,), num_questions=2, num_chunks=2, answer_tokens=1)
        assert result.made is not None
        assert (result.made.written, result.made.chunks_tried) == (0, 2)
        assert sum(result.made.faults.values()) == 10
        assert result.chosen.asked == "2 that quote the corpus"
        quoted = calibrate(engine, ratios=(0.3,), num_questions=2, num_chunks=2, answer_tokens=1, written=False)
        assert quoted.made is not None
        assert quoted.made.chunks_tried == 0
        assert quoted.made.asked == result.made.asked
