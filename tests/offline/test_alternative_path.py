"""Chunks that no ingestion has seen: what prompts leave of them becomes their one copy, or they are prefilled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ModelChangedError
from fused_kv_llm.kv import PrefixRun, PrefixTree
from fused_kv_llm.offline import AlternativePath
from fused_kv_llm.offline.prefill import Ingestor

UPLOAD, OTHER, THIRD = SHORT[:3]
QUESTION = "How many passengers can she carry?"


def make_engine(folder: Path, model: Any = None, **options: Any) -> FusedKVEngine:
    options = {"preprocessing": "none", "dtype": "float32", "recompute_ratio": 0.3, "prefix_cache_bytes": 2**26,
               **options}  # fmt: skip
    return FusedKVEngine(model or tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)


def asked(*texts: str) -> str:
    """Return a prompt that begins with chunks, without instructions before them."""
    return "\n\n".join([*texts, QUESTION])


def stored_kv(engine: FusedKVEngine, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    with engine.store.open(str(engine.chunk_id(text)), engine.token_ids(text)) as stored:  # type: ignore[union-attr]
        keys, values = stored.read_layers(0, stored.num_layers)
        return keys.clone(), values.clone()


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Chunks that ingestion has computed."""
    texts, real = list[str](), Ingestor._prefill

    def noting(self: Ingestor, batch: Any) -> Any:
        texts.extend(chunk.text for chunk in batch)
        return real(self, batch)

    monkeypatch.setattr(Ingestor, "_prefill", noting)
    return texts


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_what_a_prompt_left_is_what_an_ingestion_computes(
    tmp_path: Path, prefilled: list[str], architecture: str, ratio: float
) -> None:
    model = tiny_model(architecture)
    with make_engine(tmp_path / "live", model) as live, make_engine(tmp_path / "ingested", model) as ingested:
        live.prefetch([UPLOAD])
        assert live.chunk_id(UPLOAD) is None
        live.generate(asked(UPLOAD), max_tokens=2, recompute_ratio=ratio)
        live.wait_for_background()
        assert not prefilled, "it was computed once, by the prompt"
        ingested.build_kv_cache([UPLOAD], progress=False)
        assert live.chunk_id(UPLOAD) == ingested.chunk_id(UPLOAD) is not None
        for got, want in zip(stored_kv(live, UPLOAD), stored_kv(ingested, UPLOAD), strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_it_is_reused_behind_other_chunks_as_any_stored_chunk_is(tmp_path: Path, prefilled: list[str]) -> None:
    model, later = tiny_model(), asked(OTHER, THIRD, UPLOAD)
    with make_engine(tmp_path / "live", model) as live, make_engine(tmp_path / "ingested", model) as ingested:
        live.build_kv_cache([OTHER, THIRD], progress=False)
        ingested.build_kv_cache([OTHER, THIRD, UPLOAD], progress=False)
        del prefilled[:]
        # Nobody has announced it before it was asked about.
        live.generate(asked(UPLOAD), max_tokens=1)
        live.wait_for_background()
        assert live.chunk_id(UPLOAD) is None
        assert live.prefetch([UPLOAD, OTHER])[0] == ingested.chunk_id(UPLOAD)
        assert not prefilled
        for ratio in (0.0, 0.3):
            got, want = (engine.prefill(later, recompute_ratio=ratio) for engine in (live, ingested))
            assert got[1].chunks_found == want[1].chunks_found == 3
            assert got[1].computed_tokens == want[1].computed_tokens
            torch.testing.assert_close(got[0].logits, want[0].logits, atol=1e-4, rtol=1e-4)
        exact, plain = live.prefill(later, recompute_ratio=1.0), ingested.prefill(later, recompute_ratio=1.0)
        torch.testing.assert_close(exact[0].logits, plain[0].logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("before", ["Answer from this:", OTHER])
def test_kv_behind_anything_else_is_not_taken(tmp_path: Path, prefilled: list[str], before: str) -> None:
    """It depends on that; the chunk is prefilled by itself."""
    with make_engine(tmp_path) as engine:
        engine.prefetch([UPLOAD])
        engine.generate(asked(before, UPLOAD), max_tokens=1)
        engine.wait_for_background()
        assert prefilled == [UPLOAD]
        assert engine.chunk_id(UPLOAD) is not None


def test_there_is_one_copy_however_often_it_is_found(tmp_path: Path, prefilled: list[str]) -> None:
    with make_engine(tmp_path) as engine:
        for texts in ([UPLOAD, OTHER], [UPLOAD, THIRD], [OTHER, UPLOAD], [THIRD, OTHER, UPLOAD], [UPLOAD]):
            engine.prefetch([UPLOAD])
            engine.generate(asked(*texts), max_tokens=1)
            engine.wait_for_background()
        assert engine.stored_texts() == [UPLOAD]
        assert len(engine.store.keys(engine.identity)) == 1
        assert engine.corpus._ingestor.adopt([UPLOAD]) == 1, "it is still found"
        assert len(engine.store.keys(engine.identity)) == 1
        assert not prefilled
        report = engine.build_kv_cache([UPLOAD], progress=False)
        assert (report.chunks_new, report.chunks_adopted, report.chunks_present) == (0, 0, 1)


def test_an_ingestion_takes_what_prompts_have_left(tmp_path: Path, prefilled: list[str]) -> None:
    with make_engine(tmp_path) as engine:
        engine.generate(asked(UPLOAD, OTHER), max_tokens=1)
        report = engine.build_kv_cache([UPLOAD, OTHER, THIRD], progress=False)
        assert (report.chunks_new, report.chunks_adopted) == (3, 1)
        assert prefilled == [OTHER, THIRD]
        assert report.tokens == sum(len(engine.token_ids(text)) for text in prefilled)
        assert "2 chunks prefilled" in report.summary()
        assert "1 taken from answered prompts" in report.summary()


def test_fused_kv_is_never_taken(tmp_path: Path) -> None:
    """Nor a part of a chunk, nor what is not a number."""
    with make_engine(tmp_path) as engine:
        tree, header = PrefixTree(2**26), engine._parts.prefix
        path, ids = AlternativePath(tree, engine.loaded, header), [*header.token_ids, *range(100, 120)]
        keys = torch.randn(3, 2, len(ids), 8)
        home = len(ids) - 20
        tree.insert(ids, [PrefixRun(home), PrefixRun(len(ids), "fused")], keys, keys)
        assert path.find(ids[home:]) is None
        tree.insert(ids[:-1], [PrefixRun(len(ids) - 1)], keys, keys)
        assert path.find(ids[home:]) is None
        tree.insert(ids, [PrefixRun(len(ids))], keys, keys)
        found = path.find(ids[home:])
        assert found is not None
        assert (found.position, found.token_ids) == (home, tuple(ids[home:]))
        torch.testing.assert_close(found.keys, keys[:, :, home:], atol=0, rtol=0)
        tree.clear()
        keys[1, 0, home, 3] = np.nan
        tree.insert(ids, [PrefixRun(len(ids))], keys, keys)
        assert path.find(ids[home:]) is None
        assert path.find([]) is None


def test_nothing_crosses_from_one_tenant_to_another(tmp_path: Path, prefilled: list[str]) -> None:
    model = tiny_model()
    with make_engine(tmp_path, model, tenant="one") as one, make_engine(tmp_path, model, tenant="two") as two:
        one.generate(asked(UPLOAD), max_tokens=1)
        assert two.prefetch([UPLOAD]) == [None]
        assert one.prefetch([UPLOAD]) != [None]
        assert two.prefetch([UPLOAD]) == [None]
        two.generate(asked(OTHER, UPLOAD), max_tokens=1)
        two.wait_for_background()
        assert prefilled == [UPLOAD]
        assert one.chunk_id(UPLOAD) != two.chunk_id(UPLOAD) is not None


def test_what_was_forgotten_is_not_found(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        engine.generate(asked(UPLOAD), max_tokens=1)
        engine.clear_prefix_cache()
        assert engine.prefetch([UPLOAD]) == [None]
        engine.generate(asked(UPLOAD), max_tokens=1)
        engine.wait_for_background()
        assert engine.delete_chunks([UPLOAD]) == 1
        assert engine.prefetch([UPLOAD]) == [None]
        # Deleted before the prompt came that was to have it.
        assert engine.delete_chunks([UPLOAD]) == 0
        engine.generate(asked(UPLOAD), max_tokens=1)
        engine.wait_for_background()
        assert engine.chunk_id(UPLOAD) is None


@pytest.mark.parametrize("options", [{"store_misses": False}, {"prefix_cache_bytes": 0}])
def test_it_can_be_turned_off(tmp_path: Path, options: dict[str, Any]) -> None:
    with make_engine(tmp_path, **options) as engine:
        engine.generate(asked(UPLOAD), max_tokens=1)
        assert engine.prefetch([UPLOAD]) == [None]


def test_a_changed_model_takes_nothing(tmp_path: Path) -> None:
    model = tiny_model()
    with make_engine(tmp_path, model) as engine:
        engine.generate(asked(UPLOAD), max_tokens=1)
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(2.0)
        path = engine.corpus._ingestor.alternative
        assert path is not None
        with pytest.raises(ModelChangedError):
            path.find(engine.token_ids(UPLOAD))
        assert engine.prefetch([UPLOAD]) == [None]
