"""FusionRAG's preprocessing as published: the KV behind all similar chunks at once stands in for the plain KV."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from transformers import DynamicCache

from fused_kv_kernels.reference import rerotate_keys_reference
from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.offline import preprocess
from fused_kv_llm.report import FusionReport
from fused_kv_llm.store import replacement_name

KV = tuple[torch.Tensor, torch.Tensor]
OTHERS = [f"Note {n}: {text}" for n in range(2) for text in SHORT[1:6]]
"""Ten chunks."""


def make_engine(folder: Path, **options: object) -> FusedKVEngine:
    options = {"preprocessing": "fusionrag", "store_misses": False, **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


def ingest(engine: FusedKVEngine, near: Sequence[str]) -> None:
    graph = {SHORT[0]: list(near), **{text: [] for text in near}}
    engine.build_kv_cache([SHORT[0], *near], neighbours=graph, preprocess="wait", progress=False)


def rows_after(ids: Sequence[int], begin: int, cache: DynamicCache) -> KV:
    """KV of the ids from `begin`, by a plain forward of the model over what stands before them."""
    with torch.inference_mode():
        tiny_model()(
            torch.tensor([ids[begin:]]), past_key_values=cache, position_ids=torch.arange(begin, len(ids))[None]
        )
    return (
        torch.stack([layer.keys[0, :, begin:] for layer in cache.layers]),
        torch.stack([layer.values[0, :, begin:] for layer in cache.layers]),
    )


def moved(kv: KV, by: int, engine: FusedKVEngine) -> KV:
    inv_freq = engine.loaded.geometry.rotations[0].inv_freq
    return rerotate_keys_reference(kv[0], torch.full((kv[0].shape[2],), by), inv_freq), kv[1]


def equation_10(engine: FusedKVEngine, near: Sequence[str]) -> KV:
    """[KV(d'_1), ..., KV(d'_n)] at consecutive positions, the chunk behind it, and its keys at home again."""
    header = engine._parts.prefix
    home = at = len(header.token_ids)
    keys, values, ids = [header.keys], [header.values], list(header.token_ids)
    for text in near:
        own = engine.token_ids(text)
        plain = rows_after([*header.token_ids, *own], home, cache_of([header.keys], [header.values]))
        plain = moved(plain, at - home, engine)
        keys.append(plain[0])
        values.append(plain[1])
        at += len(own)
        ids += own
    after = rows_after([*ids, *engine.token_ids(SHORT[0])], at, cache_of(keys, values))
    return moved(after, home - at, engine)


def cache_of(keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> DynamicCache:
    cache = DynamicCache()
    for layer, (k, v) in enumerate(zip(torch.cat(list(keys), dim=2), torch.cat(list(values), dim=2), strict=True)):
        cache.update(k[None], v[None], layer)
    return cache


def used_kv(engine: FusedKVEngine, prompt: str) -> list[KV]:
    """What a prompt reads of its chunks."""
    with engine.requests.planner.plan(prompt, FusionReport()) as request:
        return [chunk.stored.read_layers(0, chunk.stored.num_layers) for chunk in request.chunks]


def test_the_kv_behind_ten_neighbours_replaces_the_plain_one(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        assert engine.config.neighbours == 10
        ingest(engine, OTHERS)
        want = equation_10(engine, OTHERS)
        # Wherever it stands: nothing is said of an exception for the first chunk.
        for place in (0, 1):
            prompt = rag_prompt([SHORT[0], OTHERS[0]] if place == 0 else [OTHERS[0], SHORT[0]])
            got = used_kv(engine, prompt)[place]
            for one, other in zip(got, want, strict=True):
                torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    with make_engine(tmp_path, preprocessing="none") as plain:
        unchanged = used_kv(plain, rag_prompt([SHORT[0]]))[0]
    assert not torch.allclose(unchanged[1], want[1], atol=1e-2), "the plain KV is another, and stays for others"


def test_no_prompt_for_context_shifts_is_prepared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(preprocess, "ShiftPrefill")
    with make_engine(tmp_path, num_neighbours=1) as engine:
        ingest(engine, OTHERS[:1])
        assert engine.build_kv_cache(OTHERS[:1], preprocess="later", progress=False).chunks_pending == 0


def test_behind_one_neighbour_it_is_what_a_full_prefill_gives(tmp_path: Path) -> None:
    with make_engine(tmp_path, num_neighbours=1) as engine:
        ingest(engine, OTHERS[:1])
        before = [*engine._parts.prefix.token_ids, *engine.token_ids(OTHERS[0])]
        full = rows_after([*before, *engine.token_ids(SHORT[0])], 0, DynamicCache())
        home = len(engine._parts.prefix.token_ids)
        want = moved((full[0][:, :, len(before) :], full[1][:, :, len(before) :]), home - len(before), engine)
        got = used_kv(engine, rag_prompt([SHORT[0]]))[0]
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_full_reuse_answers_from_it_without_a_weight_by_place(tmp_path: Path) -> None:
    """The logits behind one chunk, the prompt's first, are those of a forward over the KV that replaces its own."""
    prompt = rag_prompt([SHORT[0]])
    with make_engine(tmp_path) as engine:
        ingest(engine, OTHERS)
        fused, report = engine.prefill(prompt, recompute_ratio=0.0, selector="full_reuse")
        with engine.requests.planner.plan(prompt, FusionReport()) as request:
            (chunk,), ids, header = request.chunks, request.ids, engine._parts.prefix
        begin, stop, home = chunk.segment.start, chunk.segment.stop, len(header.token_ids)
        lead = rows_after(ids[:begin], home, cache_of([header.keys], [header.values]))
        inside = slice(chunk.segment.chunk_start, chunk.segment.chunk_start + stop - begin)
        moved_to = moved(equation_10(engine, OTHERS), begin - home - chunk.segment.chunk_start, engine)
        own = moved_to[0][:, :, inside], moved_to[1][:, :, inside]
        cache = cache_of([header.keys, lead[0], own[0]], [header.values, lead[1], own[1]])
        with torch.inference_mode():
            behind = torch.arange(stop, len(ids))[None]
            want = tiny_model()(torch.tensor([ids[stop:]]), past_key_values=cache, position_ids=behind).logits[0, -1]
    torch.testing.assert_close(fused.logits.flatten(), want, atol=1e-3, rtol=1e-3)
    assert report.chunks_found == 1
    assert "context_shift" not in report.sidecar_bytes_loaded


def test_chunks_ingested_in_the_background_are_preprocessed(tmp_path: Path) -> None:
    with make_engine(tmp_path, store_misses=True) as engine:
        ingest(engine, OTHERS[:2])
        engine.prefetch([SHORT[0]])
        engine.generate(rag_prompt([SHORT[0]]), max_tokens=1)
        engine.wait_for_background(progress=False)
        key = str(engine.chunk_id(SHORT[0]))
        assert engine.store.sidecars.has(key, replacement_name(10))
        report = engine.build_kv_cache([SHORT[0]], preprocess="wait", progress=False)
        assert (report.chunks_present, report.chunks_preprocessed, report.chunks_pending) == (1, 0, 0)
        assert engine.store.check().findings == []


def test_a_damaged_replacement_puts_its_chunk_away(tmp_path: Path) -> None:
    prompt = rag_prompt([SHORT[0], OTHERS[0]])
    with make_engine(tmp_path, memory_bytes=0) as engine:
        ingest(engine, OTHERS)
        (path,) = tmp_path.rglob(f"*{replacement_name(10)}*")
        whole = path.read_bytes()
        path.write_bytes(whole[:-64] + bytes(64))
        with pytest.warns(match="damaged|checksum|quarantine"):
            report = engine.generate(prompt, max_tokens=1).report
        assert report.chunks_found >= 1
        assert engine.generate(prompt, max_tokens=1).text


def test_it_does_not_go_with_variants(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="variants=2 and preprocessing='fusionrag'"):
        make_engine(tmp_path, variants=2)
