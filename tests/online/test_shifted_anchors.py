"""Anchors that are stored as most places in a prompt change them, too: what is seen of them, and when they are made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from corpus import SHORT, UnusedEmbedder, rag_prompt
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.config import DEFAULT_NEIGHBOURS, DEFAULT_PREPROCESSING_PROMPTS
from fused_kv_llm.context_shift import USUAL_WEIGHT, place_weight, shift_name
from fused_kv_llm.errors import ConfigError, FusedKVWarning
from fused_kv_llm.online import Recipe
from fused_kv_llm.online.request_loading import RequestLoading
from fused_kv_llm.report import FusionReport
from fused_kv_llm.selectors import Anchors, QueryAttention, Selector, View, sidecar_names

LAYERS, TEXTS = (0, 2, 3), SHORT[:4]
SHIFT = shift_name(DEFAULT_NEIGHBOURS, DEFAULT_PREPROCESSING_PROMPTS)
COPY = Anchors("sink", 1.0, shifted=True)
MINE = QueryAttention("mine", layers=LAYERS, anchors=COPY)
SHIFTED, PLAIN = sidecar_names(View(LAYERS, anchors=COPY, anchor_shift=SHIFT))


def graph(step: int) -> dict[str, list[str]]:
    return {text: [TEXTS[(number + step) % 4]] for number, text in enumerate(TEXTS)}


def made(folder: Path, selector: str | Selector = MINE) -> FusedKVEngine:
    return FusedKVEngine(
        tiny_model(num_hidden_layers=5), tokenizer=smollm2_tokenizer(), kv_dir=folder, selector=selector,
        preprocessing="similar", embedder=UnusedEmbedder(), store_misses=False,
    )  # fmt: skip


def names(engine: FusedKVEngine) -> list[list[str]]:
    keys = [str(engine.chunk_id(text)) for text in TEXTS]
    return [[name for name in engine.store.sidecars.names(key) if name.startswith("anchor")] for key in keys]


def scores(engine: FusedKVEngine, anchors: Anchors | None) -> torch.Tensor:
    shift = None if anchors is None else SHIFT
    view = View(LAYERS, full_context=anchors is None, anchors=anchors, anchor_shift=shift)
    return engine.requests.attention_by_layer(rag_prompt(TEXTS), view)[1]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    with made(tmp_path_factory.mktemp("shifted_anchors")) as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess="wait", progress=False)
        yield engine


def test_the_question_sees_what_it_would_with_the_usual_shift(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first chunk, which stands behind a few words of the prompt only, it sees the KV without a shift."""
    got, true = scores(engine, COPY), scores(engine, None)
    given = list[float]()

    def weight(tokens_before: int, num_tokens: int) -> float:
        given.append(place_weight(tokens_before, num_tokens))
        return USUAL_WEIGHT if given[-1] >= USUAL_WEIGHT / 2 else 0.0

    monkeypatch.setattr("fused_kv_llm.kv.placed_chunk.place_weight", weight)
    want = scores(engine, None)
    assert 0 < given[0] < USUAL_WEIGHT / 2 < min(given[1:])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)
    assert not torch.allclose(true, want, atol=1e-6, rtol=1e-4), "their places are not all alike"


def test_each_place_has_its_file_and_no_other_is_read(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    read, real = list[tuple[str, str]](), engine.store.sidecars.read

    def noting(key: str, name: str, *fits: Any) -> dict[str, torch.Tensor] | None:
        read.append((key, name))
        return real(key, name, *fits)

    monkeypatch.setattr(engine.store.sidecars, "read", noting)
    _, report = engine.prefill(rag_prompt(TEXTS), recompute_ratio=0.3)
    keys = [str(engine.chunk_id(text)) for text in TEXTS]
    assert read == [(key, SHIFTED if number else PLAIN) for number, key in enumerate(keys)]
    assert report.warnings == []
    sides = [real(*one) for one in read]
    assert report.selection_bytes == sum(part.nbytes for side in sides if side for part in side.values())


def test_all_tokens_are_ranked_by_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unexpected(*operands: object) -> None:
        raise AssertionError

    monkeypatch.setattr("fused_kv_llm.offline.anchors.kvzip_scores", unexpected)
    with made(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess="later", progress=False)
        everything = QueryAttention("everything", layers=LAYERS, anchors=replace(COPY, rule="kvzip"))
        assert engine.build_anchors(TEXTS, selector=everything, progress=False) == 4


@pytest.mark.parametrize("when", ["wait", "background"])
def test_copies_with_shifts_follow_the_shifts(tmp_path: Path, when: str) -> None:
    """Before, the question sees all chunks without, and nothing is missed."""
    with made(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess="later", progress=False)
        assert names(engine) == [[PLAIN]] * 4
        assert engine.prefill(rag_prompt(TEXTS), recompute_ratio=0.3)[1].warnings == []
        assert engine.build_anchors(TEXTS, progress=False) == 0
        engine.build_kv_cache(TEXTS, preprocess=when, progress=False)  # type: ignore[arg-type]
        engine.wait_for_background(progress=False)
        assert names(engine) == [sorted([PLAIN, SHIFTED])] * 4
        assert engine.build_anchors(TEXTS, progress=False) == 0


def test_copies_are_made_again_with_new_shifts(tmp_path: Path) -> None:
    with made(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess="wait", progress=False)
        before, plain = scores(engine, COPY), names(engine)
        engine.build_kv_cache(TEXTS, neighbours=graph(2), preprocess="wait", refresh=True, progress=False)
        assert names(engine) == plain
        after = scores(engine, COPY)
        assert not torch.equal(before, after)
        for text in TEXTS:
            engine.store.sidecars.remove(str(engine.chunk_id(text)), SHIFTED)
        assert engine.build_anchors(TEXTS, progress=False) == 4
        assert torch.equal(scores(engine, COPY), after)


def test_an_engine_without_shifts_keeps_no_copies_with_them(tmp_path: Path) -> None:
    with FusedKVEngine(
        tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=tmp_path, selector="sink_attention_anchors",
        preprocessing="none", store_misses=False,
    ) as engine:  # fmt: skip
        engine.build_kv_cache(TEXTS, progress=False)
        assert [len(of) for of in names(engine)] == [1] * 4
        assert engine.prefill(rag_prompt(TEXTS), recompute_ratio=0.3)[1].warnings == []


def test_a_chunk_twice_in_a_prompt_is_read_by_its_places(engine: FusedKVEngine) -> None:
    request = engine.requests.planner.plan(rag_prompt([TEXTS[1], TEXTS[2], TEXTS[1]]), FusionReport())
    view = View(LAYERS, anchors=COPY, anchor_shift=SHIFT)
    with request:
        found = [request.anchor_names(chunk, view) for chunk in request.chunks]
    assert found == [(PLAIN,), (SHIFTED, PLAIN), (SHIFTED, PLAIN)]


def test_instead_of_a_copy_that_does_not_fit_the_one_without_shift_is_read(tmp_path: Path) -> None:
    with made(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess="wait", progress=False)
        key, sidecars = str(engine.chunk_id(TEXTS[2])), engine.store.sidecars
        side, plain = sidecars.read(key, SHIFTED), sidecars.read(key, PLAIN)
        assert side is not None
        assert plain is not None
        whole = engine.prefill(rag_prompt(TEXTS), recompute_ratio=0.3)[1].selection_bytes
        sidecars.put(key, SHIFTED, {**side, "positions": side["positions"].flip(0)})
        with pytest.warns(FusedKVWarning, match="do not fit this model and this chunk"):
            _, report = engine.prefill(rag_prompt(TEXTS), recompute_ratio=0.3)
        assert report.selection_bytes == whole
        (warning,) = report.warnings
        assert warning.startswith("1 chunks have a context shift, but no stored anchors with it")
        assert engine.build_anchors(TEXTS, progress=False) == 1
        assert engine.prefill(rag_prompt(TEXTS), recompute_ratio=0.3)[1].warnings == []


def told(engine: FusedKVEngine) -> list[str]:
    return engine.prefill(rag_prompt(TEXTS), recompute_ratio=0.3, selector=MINE)[1].warnings


def test_another_selectors_copies_are_missed_and_never_of_an_older_shift(tmp_path: Path) -> None:
    """Whoever preprocesses knows nothing of them; a copy of a shift that is made anew goes before it does."""
    with made(tmp_path, "sink_attention") as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess="later", progress=False)
        assert engine.build_anchors(TEXTS, selector=MINE, progress=False) == 4
        assert told(engine) == []
        engine.preprocess(progress=False)
        (warning,) = told(engine)
        assert warning.startswith("3 chunks have a context shift, but no stored anchors with it"), (
            "the first needs none"
        )
        assert engine.build_anchors(TEXTS, selector=MINE, progress=False) == 4
        assert told(engine) == []
        engine.build_kv_cache(TEXTS, neighbours=graph(2), preprocess="wait", refresh=True, progress=False)
        assert names(engine) == [[PLAIN]] * 4
        assert len(told(engine)) == 1


def test_a_copy_that_cannot_be_stored_stops_no_preprocessing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with made(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess="later", progress=False)
        with monkeypatch.context() as patched:
            patched.setattr(engine.store.sidecars, "read", lambda *of: 1 / 0)
            engine.build_kv_cache(TEXTS, preprocess="wait", progress=False)
        assert engine.corpus.stored_texts() == list(TEXTS)
        assert sum("was not stored" in record.message for record in caplog.records) == 4
        assert names(engine) == [[PLAIN]] * 4
        assert engine.build_anchors(TEXTS, progress=False) == 4


def test_a_chunk_that_goes_meanwhile_is_left_out(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(key: str, name: str, side: object) -> int:
        raise ConfigError(f"{key} is not stored")

    monkeypatch.setattr(engine.store.sidecars, "put", gone)
    other = QueryAttention("other", layers=(1,), anchors=Anchors("sink", 0.5))
    with pytest.raises(ConfigError, match="not stored"):
        engine.build_anchors(TEXTS, selector=other, progress=False)
    monkeypatch.setattr(engine.store, "contains", lambda keys: set[str]())
    assert engine.build_anchors(TEXTS, selector=other, progress=False) == 0


@pytest.mark.parametrize("broken", ["layers", "heads", "tokens", "scales", "unreadable"])
def test_no_copy_is_made_of_a_shift_that_does_not_fit(
    tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made(tmp_path, "sink_attention") as engine:
        engine.build_kv_cache(TEXTS[:2], neighbours=graph(1), preprocess="wait", progress=False)
        key, real = str(engine.chunk_id(TEXTS[0])), engine.store.sidecars.read
        side = real(key, SHIFT)
        assert side is not None
        wrong = {
            "layers": {name: part[:2] for name, part in side.items()},
            "heads": {name: part[:, :1] for name, part in side.items()},
            "tokens": {name: part[:, :, 1:] for name, part in side.items()},
            "scales": {name: part for name, part in side.items() if "scale" not in name},
            "unreadable": None,
        }[broken]

        def read(of: str, name: str, *fits: Any) -> dict[str, torch.Tensor] | None:
            return wrong if (of, name) == (key, SHIFT) else real(of, name, *fits)

        monkeypatch.setattr(engine.store.sidecars, "read", read)
        assert engine.build_anchors(TEXTS[:2], selector=MINE, progress=False) == 2
        assert [name for name in engine.store.sidecars.names(key) if name.startswith("anchor")] == [PLAIN]
        assert SHIFTED in engine.store.sidecars.names(str(engine.chunk_id(TEXTS[1])))
        assert engine.build_anchors(TEXTS[:2], selector=MINE, progress=False) == 0


def test_a_rule_ranks_the_tokens_once_and_old_files_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = QueryAttention("few", layers=LAYERS, anchors=Anchors("kvzip", 0.3, shifted=True))
    with made(tmp_path, few) as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess="later", progress=False)
        key = str(engine.chunk_id(TEXTS[0]))
        engine.store.sidecars.put(key, "anchors-kvzip-0.3-0-2-3", {"positions": torch.zeros(1)})

        def unexpected(*operands: object) -> None:
            raise AssertionError

        monkeypatch.setattr("fused_kv_llm.offline.anchors.kvzip_scores", unexpected)
        engine.build_kv_cache(TEXTS, preprocess="wait", progress=False)
        own, shifted = (engine.store.sidecars.read(key, name) for name in engine.store.sidecars.names(key)[:2])
        assert own is not None
        assert shifted is not None
        assert torch.equal(own["positions"], shifted["positions"])
        assert not any(name.startswith("anchors-") for name in engine.store.sidecars.names(key))


@pytest.mark.parametrize("when", ["wait", "later"])
def test_the_copy_that_is_used_is_loaded_ahead(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is none with a shift yet."""
    with made(tmp_path) as engine:
        engine.build_kv_cache(TEXTS, neighbours=graph(1), preprocess=when, progress=False)  # type: ignore[arg-type]
        found, real = list[tuple[str, str]](), engine.store.sidecars.read

        def noting(key: str, name: str, *fits: Any) -> dict[str, torch.Tensor] | None:
            side = real(key, name, *fits)
            if side is not None:
                found.append((key, name))
            return side

        monkeypatch.setattr(engine.store.sidecars, "read", noting)
        request = engine.requests.planner.plan(rag_prompt(TEXTS), FusionReport())
        loading = RequestLoading(engine.requests.context, request, Recipe(MINE, 0.3))
        with request:
            for load in loading._sidecar_places():
                load(0, 1)
        keys = [str(engine.chunk_id(text)) for text in TEXTS]
        assert found == [(key, SHIFTED if number and when == "wait" else PLAIN) for number, key in enumerate(keys)]
