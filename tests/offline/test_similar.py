"""Similarity-guided preprocessing: neighbours, the KV that follows them, what is stale, what is remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import DynamicCache

from fused_kv_kernels import has_eight_bit_linears, why_not_native
from fused_kv_kernels.reference import rerotate_keys_reference
from fused_kv_llm import FusedKVEngine, IngestReport
from fused_kv_llm.config import DEFAULT_PREPROCESSING_PROMPTS
from fused_kv_llm.context_shift import place_weight, shift_name
from fused_kv_llm.errors import ConfigError
from fused_kv_llm.model import FusedCache
from fused_kv_llm.offline import SentenceEmbedder, preprocess, prompt_prefill, shift_prefill
from fused_kv_llm.offline.batches import PendingChunk
from fused_kv_llm.offline.neighbours import find_neighbours
from fused_kv_llm.offline.plain_kv import PlainKVCache
from fused_kv_llm.offline.prompt_prefill import PromptPrefill
from fused_kv_llm.offline.shift_prompts import BEFORE_CHUNKS, BETWEEN_CHUNKS
from fused_kv_llm.offline.vectors import corpus_vectors, unknown_texts


class Letters:
    """Embeds by letter frequencies and counts what it is asked."""

    name = "letters"

    def __init__(self) -> None:
        self.asked: list[str] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.asked += texts
        counts = np.array([[text.lower().count(c) for c in "abcdefghijklmnopqrstuvwxyz"] for text in texts], np.float32)
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


SHIFT = shift_name(2, DEFAULT_PREPROCESSING_PROMPTS)


def make_engine(folder: Path, **options: object) -> FusedKVEngine:
    options = {"preprocessing": "similar", "num_neighbours": 2, "embedder": Letters(), "store_misses": False, **options}
    return FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, **options)  # type: ignore[arg-type]


def ingest(engine: FusedKVEngine, texts: Sequence[str], **options: object) -> IngestReport:
    """Both passes."""
    return engine.build_kv_cache(texts, preprocess="wait", progress=False, **options)  # type: ignore[arg-type]


def shift_of(engine: FusedKVEngine, text: str, name: str = SHIFT) -> dict[str, torch.Tensor]:
    side = engine.store.sidecars.read(str(engine.chunk_id(text)), name)
    assert side is not None
    return side


def stored_kv(engine: FusedKVEngine, text: str) -> tuple[torch.Tensor, torch.Tensor]:
    key = engine.chunk_id(text)
    assert key is not None
    stored = engine.store.open(key, tuple(engine.token_ids(text)))
    assert stored is not None
    with stored:
        return stored.read_layers(0, stored.num_layers)


def test_neighbours_equal_brute_force() -> None:
    embedder = Letters()
    vectors = embedder.encode(SHORT)
    found = find_neighbours(SHORT, SHORT, 3, embedder, None)
    for text, vector in zip(SHORT, vectors, strict=True):
        ranked = sorted((t for t in SHORT if t != text), key=lambda t: -float(vectors[SHORT.index(t)] @ vector))
        assert list(found[text]) == ranked[:3]


def test_a_small_corpus_has_fewer_neighbours() -> None:
    assert find_neighbours(SHORT[:1], SHORT[:1], 3, Letters(), None) == {SHORT[0]: ()}
    assert find_neighbours(SHORT[:1], SHORT[:2], 3, Letters(), None) == {SHORT[0]: (SHORT[1],)}


_PARTS = ("keys", "values")
Change = tuple[torch.Tensor, torch.Tensor, float]
"""What a prompt changes in the keys and values of a chunk, and the weight of its place there."""


def in_prompt(
    engine: FusedKVEngine, texts: Sequence[str], wanted: str, shifts: Mapping[str, Sequence[torch.Tensor]] | None = None
) -> Change:
    """Return what a prompt changes in a chunk of it that is not its first.

    A plain forward of all but the first chunk, which has its plain KV, and those that have it with a given shift.
    """
    model, shifts = tiny_model(), shifts or {}
    header, between = engine._parts.prefix.token_ids, engine.token_ids(BETWEEN_CHUNKS)
    inv_freq = engine.loaded.geometry.rotations[0].inv_freq

    def moved(keys: torch.Tensor, by: int) -> torch.Tensor:
        return rerotate_keys_reference(keys, torch.full((keys.shape[-2],), by), inv_freq)

    ids, start, cache = [*header, *engine.token_ids(BEFORE_CHUNKS)], 0, DynamicCache()
    with torch.inference_mode():
        for text in texts:
            if text == wanted:
                start = len(ids)
            if text == texts[0] or text in shifts:
                model(torch.tensor([ids[cache.get_seq_length() :]]), past_key_values=cache)
                before = len(ids) - len(header)
                weight = place_weight(before, len(engine.token_ids(text)))
                # It may not be stored: its plain KV is that right behind the header.
                alone = model(torch.tensor([[*header, *engine.token_ids(text)]]), past_key_values=DynamicCache())
                layers = alone.past_key_values.layers
                plain = (torch.stack([getattr(one, name)[0, :, len(header) :] for one in layers]) for name in _PARTS)
                given = shifts.get(text, (torch.zeros(()), torch.zeros(())))
                keys, values = (one + weight * shift for one, shift in zip(plain, given, strict=True))
                for layer, (of_keys, of_values) in enumerate(zip(moved(keys, before), values, strict=True)):
                    cache.update(of_keys[None], of_values[None], layer)
            ids += [*engine.token_ids(text), *between]
        layers = model(torch.tensor([ids[cache.get_seq_length() :]]), past_key_values=cache).past_key_values.layers
    stop = start + len(engine.token_ids(wanted))
    keys = torch.stack([layer.keys[0, :, start:stop] for layer in layers])
    values = torch.stack([layer.values[0, :, start:stop] for layer in layers])
    plain_keys, plain_values = stored_kv(engine, wanted)
    before = start - len(header)
    return moved(keys, -before) - plain_keys, values - plain_values, place_weight(before, stop - start)


def fitted(changes: Sequence[Change]) -> list[torch.Tensor]:
    """Return the least-squares fit to changes of keys and values."""
    power = 0.15 + sum(one[2] ** 2 for one in changes)
    return [torch.stack([one[2] * one[index] for one in changes]).sum(0) / power for index in (0, 1)]


def check_fit(engine: FusedKVEngine, text: str, changes: Sequence[Change]) -> None:
    """The stored shift of a chunk is the least-squares fit to what prompts change in it."""
    side = shift_of(engine, text, shift_name(2, engine.config.preprocessing_prompts))
    for name, want in zip(_PARTS, fitted(changes), strict=True):
        assert float(want.abs().max()) > 0.05
        assert float((side[name] * side[f"{name}_scale"] - want).abs().max()) < 0.01 * float(want.abs().max())


def check_shift(engine: FusedKVEngine, text: str, prompts: Sequence[Sequence[str]]) -> None:
    """The same for prompts of which the first chunk alone is not computed."""
    check_fit(engine, text, [in_prompt(engine, prompt, text) for prompt in prompts if prompt[0] != text])


@pytest.mark.parametrize("prompts", [1, 2, 4])
def test_the_shift_is_what_full_prefill_changes_in_prompts_of_similar_chunks(tmp_path: Path, prompts: int) -> None:
    with make_engine(tmp_path, preprocessing_prompts=prompts) as engine:
        report = ingest(engine, SHORT[:3])
        assert (report.chunks_preprocessed, report.neighbour_tokens) == (3, 0)
        one, two, three = group = sorted(SHORT[:3], key=lambda text: str(engine.chunk_id(text)))
        orders = [group, group[::-1]]
        if prompts == 4:
            orders += [[one, three, two], [two, three, one]]
        for text in group:
            check_shift(engine, text, orders)


def test_shifts_of_other_prompts_are_made_beside_those_that_are_there(tmp_path: Path) -> None:
    four = shift_name(2, 4)
    with make_engine(tmp_path) as engine:
        ingest(engine, SHORT[:3])
        two = shift_of(engine, SHORT[0])
    with make_engine(tmp_path, preprocessing_prompts=4) as engine:
        assert engine.store.sidecars.read(str(engine.chunk_id(SHORT[0])), four) is None
        assert ingest(engine, SHORT[:3]).chunks_preprocessed == 3
        assert not torch.equal(shift_of(engine, SHORT[0], four)["keys"], two["keys"])
        assert torch.equal(shift_of(engine, SHORT[0])["keys"], two["keys"])


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[PendingChunk]]:
    """The groups that are put into prompts."""
    found, real = list[Sequence[PendingChunk]](), shift_prefill.prompts_of_group

    def noting(group: Sequence[PendingChunk], *arguments: Any) -> Any:
        found.append(group)
        return real(group, *arguments)

    monkeypatch.setattr(shift_prefill, "prompts_of_group", noting)
    return found


def test_with_one_prompt_half_of_the_chunks_are_computed_again_behind_the_others(
    tmp_path: Path, groups: list[Sequence[PendingChunk]]
) -> None:
    """These have the shift that the first prompt shows."""
    with make_engine(tmp_path, preprocessing_prompts=1) as engine:
        report = ingest(engine, SHORT[:4])
        assert (report.chunks_preprocessed, report.neighbour_tokens) == (4, 0)
        group = [chunk.text for chunk in groups[0]]
        one, two, three, four = group
        check_shift(engine, four, [group])
        check_shift(engine, three, [group])
        known = {three: fitted([in_prompt(engine, group, three)])}
        check_fit(engine, one, [in_prompt(engine, group[::-1], one, known)])
        check_fit(engine, two, [in_prompt(engine, group, two), in_prompt(engine, group[::-1], two, known)])


@pytest.mark.skipif(
    why_not_native(torch.float32) is not None or not has_eight_bit_linears(), reason="no eight-bit products here"
)
def test_shifts_of_a_long_pass_are_made_in_eight_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And near those that are not; with fixed pieces they are not at all."""
    model = tiny_model(hidden_size=192, intermediate_size=256)

    def made(folder: str, **options: Any) -> dict[str, torch.Tensor]:
        with FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=tmp_path / folder, num_neighbours=2,
                           embedder=Letters(), **options) as engine:  # fmt: skip
            ingest(engine, SHORT[:3])
            side = shift_of(engine, SHORT[0])
        return {name: side[name] * side[f"{name}_scale"] for name in ("keys", "values")}

    in_full = made("in full")
    monkeypatch.setattr(preprocess, "WORTH_EIGHT_BITS_TOKENS", 1)
    got, fixed = made("eight bits"), made("fixed", batch_tokens=64)
    for name, want in in_full.items():
        assert 0.001 < float((got[name] - want).norm() / want.norm()) < 0.2
        assert float((fixed[name] - want).norm() / want.norm()) < 0.001


def test_neighbours_are_stale_for_each_number_of_prompts_apart(tmp_path: Path) -> None:
    with make_engine(tmp_path, preprocessing_prompts=2) as engine:
        ingest(engine, SHORT[:3])
        assert ingest(engine, SHORT).chunks_stale > 0
    with make_engine(tmp_path, preprocessing_prompts=4) as engine:
        assert ingest(engine, SHORT).chunks_stale == 0, "all shifts are new"
    with make_engine(tmp_path, preprocessing_prompts=2) as engine:
        assert ingest(engine, SHORT).chunks_stale > 0, "those of two prompts are as old as they were"


def test_a_chunk_alone_stands_behind_the_callers_neighbours_of_it(tmp_path: Path) -> None:
    """Which are not stored themselves."""
    with make_engine(tmp_path) as engine:
        report = ingest(engine, SHORT[:1], neighbours={SHORT[0]: [SHORT[1], SHORT[2]]})
        assert report.neighbour_tokens == len(engine.token_ids(SHORT[2])), "the first one's plain KV is used"
        check_shift(engine, SHORT[0], [[SHORT[1], SHORT[2], SHORT[0]]])


def test_plain_kv_that_is_not_stored_exactly_is_no_neighbours(tmp_path: Path) -> None:
    """It is computed again, of the very chunks that are preprocessed."""
    with make_engine(tmp_path, kv_dtype="int8") as engine:
        report = ingest(engine, SHORT[:3])
        assert (report.chunks_preprocessed, report.neighbour_tokens) == (3, 0)


def test_a_shift_whose_file_is_gone_is_made_up_for(tmp_path: Path) -> None:
    graph = {text: [other for other in SHORT[:3] if other != text] for text in SHORT[:3]}
    with make_engine(tmp_path) as engine:
        ingest(engine, SHORT[:3], neighbours=graph)
        want = shift_of(engine, SHORT[0])
        (side,) = (path for path in tmp_path.rglob(f"*{SHIFT}*") if str(engine.chunk_id(SHORT[1])) in str(path))
        side.unlink()
        report = ingest(engine, SHORT[:3], neighbours=graph)
        assert (report.chunks_present, report.chunks_new, report.chunks_preprocessed) == (3, 0, 1)
        # Alone behind its neighbours now, and not with them.
        check_shift(engine, SHORT[1], [[SHORT[0], SHORT[2], SHORT[1]]])
        assert all(torch.equal(part, want[name]) for name, part in shift_of(engine, SHORT[0]).items())
        assert ingest(engine, SHORT[:3], neighbours=graph).chunks_preprocessed == 0


def test_the_first_chunk_has_no_neighbours_and_nothing_is_pending(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        report = ingest(engine, SHORT[:1])
        assert (report.chunks_new, report.chunks_preprocessed, report.chunks_pending) == (1, 0, 0)
        assert not engine.store.sidecars.has(str(engine.chunk_id(SHORT[0])), SHIFT)


def test_preprocessed_chunks_are_found_and_fused(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        ingest(engine, SHORT[:6])
        report = engine.generate(rag_prompt(SHORT[1:5]), max_tokens=2).report
        assert report.chunks_found == 4
        assert report.reused_tokens > 0
        assert report.sidecar_bytes_loaded["context_shift"] > 0
        assert None not in engine.prefetch(SHORT[:6])


def test_chunks_are_stored_once_whatever_their_preprocessing(tmp_path: Path) -> None:
    """Three engines share every chunk; each adds and sees its own shifts only."""
    prompt = rag_prompt(SHORT[:4])
    with make_engine(tmp_path / "a", preprocessing="none") as plain:
        plain.build_kv_cache(SHORT[:4], progress=False)
        want = plain.prefill(prompt, recompute_ratio=0.0)[0].logits
    with make_engine(tmp_path / "b") as two:
        assert ingest(two, SHORT[:4]).chunks_new == 4
        shifted, report = two.prefill(prompt, recompute_ratio=0.0)
        assert report.sidecar_bytes_loaded["context_shift"] > 0
        assert not torch.allclose(shifted.logits, want, atol=1e-3)
    with make_engine(tmp_path / "b", preprocessing="none") as plain:
        assert plain.build_kv_cache(SHORT[:4], progress=False).chunks_present == 4
        fused, report = plain.prefill(prompt, recompute_ratio=0.0)
        assert "context_shift" not in report.sidecar_bytes_loaded
        torch.testing.assert_close(fused.logits, want)
    with make_engine(tmp_path / "b", num_neighbours=3) as three:
        _, report = three.prefill(prompt, recompute_ratio=0.0)
        assert "context_shift" not in report.sidecar_bytes_loaded
        report = ingest(three, SHORT[:4])
        assert (report.chunks_new, report.chunks_preprocessed) == (0, 4)
        assert three.store.stats().chunks == 4
    with make_engine(tmp_path / "b") as two:
        torch.testing.assert_close(two.prefill(prompt, recompute_ratio=0.0)[0].logits, shifted.logits)


def test_new_neighbours_make_chunks_stale_and_refresh_recomputes_only_those(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        old = [text for text in SHORT[:6] if text != SHORT[1]]
        ingest(engine, old)
        shifts = {text: shift_of(engine, text) for text in old}
        near = find_neighbours([*old, SHORT[1]], [*old, SHORT[1]], 2, Letters(), None)
        changed = {text for text in old if SHORT[1] in near[text]}
        assert 0 < len(changed) < len(old), "the case is meant to have both"
        report = ingest(engine, [SHORT[1]])
        assert (report.chunks_new, report.chunks_preprocessed, report.chunks_stale) == (1, 1, len(changed))
        assert f"{len(changed)} have new neighbours" in report.summary()
        assert engine.generate(rag_prompt(old), max_tokens=1).report.chunks_found == len(old), "stale KV stays usable"
        assert ingest(engine, [SHORT[1]]).chunks_stale == len(changed), "it stays stale until it is refreshed"
        refreshed = ingest(engine, [SHORT[1]], refresh=True)
        assert (refreshed.chunks_new, refreshed.chunks_refreshed, refreshed.chunks_stale) == (0, len(changed), 0)
        now = {text: shift_of(engine, text) for text in old}
        assert {text for text in old if not torch.equal(now[text]["keys"], shifts[text]["keys"])} == changed
        assert engine.store.stats().chunks == 6, "one copy of every chunk"
        assert ingest(engine, [SHORT[1]]).chunks_stale == 0


def test_a_deleted_neighbour_makes_chunks_stale(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        ingest(engine, SHORT[:6])
        near = find_neighbours(SHORT[:6], SHORT[:6], 2, Letters(), None)
        engine.delete_chunks([SHORT[2]])
        left = [text for text in SHORT[:6] if text != SHORT[2]]
        assert ingest(engine, left).chunks_stale == sum(SHORT[2] in near[text] for text in left) > 0


def test_a_chunk_that_is_deleted_while_the_pass_is_planned_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_engine(tmp_path) as engine:
        engine.build_kv_cache(SHORT[:5], preprocess="later", progress=False)
        assert engine.corpus._preprocessor is not None
        catalog = engine.corpus._preprocessor._planner.catalog
        keys_of = catalog.keys

        def keys() -> list[str]:
            found = keys_of()
            monkeypatch.undo()
            engine.delete_chunks(SHORT[:1])
            return found

        monkeypatch.setattr(catalog, "keys", keys)
        assert engine.preprocess(progress=False).chunks_preprocessed == 4


def test_what_is_stale_is_known_to_the_next_process(tmp_path: Path) -> None:
    with make_engine(tmp_path) as one, make_engine(tmp_path) as two:
        ingest(one, SHORT[:5])
        stale = ingest(two, [SHORT[5]]).chunks_stale
        assert stale > 0
        assert ingest(one, SHORT[:5]).chunks_stale == stale
        assert ingest(one, SHORT[:5], refresh=True).chunks_refreshed == stale
        assert ingest(two, [SHORT[5]]).chunks_stale == 0
    with make_engine(tmp_path) as three:
        assert ingest(three, SHORT[:6]).chunks_stale == 0


def test_a_callers_graph_is_remembered(tmp_path: Path) -> None:
    """At later calls without it, by other engines too, and only for the chunks that it was given for."""
    graph = {SHORT[0]: [SHORT[3]], SHORT[1]: []}
    with make_engine(tmp_path) as engine:
        ingest(engine, SHORT[:2], neighbours=graph)
        before = shift_of(engine, SHORT[0])
    with make_engine(tmp_path) as engine:
        report = ingest(engine, SHORT[2:5])
        assert (report.chunks_preprocessed, report.chunks_stale, report.chunks_pending) == (3, 0, 0)
        assert ingest(engine, SHORT[:5], refresh=True).chunks_refreshed == 0
        assert torch.equal(shift_of(engine, SHORT[0])["keys"], before["keys"])
        report = ingest(engine, SHORT[:1], neighbours={SHORT[0]: [SHORT[2]]}, refresh=True)
        assert report.chunks_refreshed == 1
        assert not torch.equal(shift_of(engine, SHORT[0])["keys"], before["keys"])


def test_a_remembered_graph_serves_a_pass_that_another_process_did_not_reach(tmp_path: Path) -> None:
    graph = {text: [SHORT[3]] for text in SHORT[:3]}
    with make_engine(tmp_path / "cut") as engine:
        engine.build_kv_cache(SHORT[:4], neighbours=graph, preprocess="later", progress=False)
    with make_engine(tmp_path / "cut") as cut, make_engine(tmp_path / "whole") as whole:
        assert ingest(cut, SHORT[:4]).chunks_preprocessed == 3
        ingest(whole, SHORT[:4], neighbours=graph)
        for text in SHORT[:3]:
            assert torch.equal(shift_of(cut, text)["keys"], shift_of(whole, text)["keys"])


def test_vectors_are_made_once(tmp_path: Path) -> None:
    embedder = Letters()
    with make_engine(tmp_path, embedder=embedder) as engine:
        ingest(engine, SHORT[:4])
        assert sorted(embedder.asked) == sorted(SHORT[:4])
        ingest(engine, SHORT[:5])
        assert sorted(embedder.asked) == sorted(SHORT[:5])


class Grouped(Letters):
    """Gives a text another vector beside other texts, as an embedder in bfloat16 may."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        vectors = super().encode(texts)
        beside = np.float32(sum(len(text) for text in texts) % 97)
        return (vectors + beside * np.float32(1e-4)).astype(np.float32)


def test_the_order_of_the_texts_does_not_change_their_vectors(tmp_path: Path) -> None:
    texts = [f"{text} {number}" for number in range(4) for text in SHORT]
    in_order = corpus_vectors(texts, Grouped(), None)
    turned = corpus_vectors(texts[::-1], Grouped(), None)[::-1]
    np.testing.assert_array_equal(in_order, turned)
    path = tmp_path / "vectors.sqlite"
    assert unknown_texts(texts, Grouped(), path) == unknown_texts(texts[::-1], Grouped(), path)


def test_how_soon_vectors_come_does_not_tell_what_another_tenant_has_embedded(tmp_path: Path) -> None:
    embedder = Letters()
    for times, tenant in enumerate(("", "one", "two"), 1):
        with make_engine(tmp_path, embedder=embedder, tenant=tenant) as engine:
            ingest(engine, SHORT[:4])
            assert sorted(embedder.asked) == sorted(times * SHORT[:4])
    # A tenant's own are remembered.
    path = tmp_path / "vectors.sqlite"
    for tenant in ("one", "two"):
        corpus_vectors(SHORT[:4], embedder, path, tenant=tenant)
    assert len(embedder.asked) == 12
    corpus_vectors([f"one\0{text}" for text in SHORT[:4]], embedder, path)
    assert len(embedder.asked) == 16


def test_a_damaged_vector_file_is_passed_over_and_said(tmp_path: Path) -> None:
    path = tmp_path / "vectors.sqlite"
    path.write_bytes(b"not a database, whatever it may be" * 100)
    with pytest.warns(UserWarning, match=r"vectors\.sqlite"):
        vectors = corpus_vectors(SHORT[:3], Letters(), path)
    np.testing.assert_allclose(vectors, Letters().encode(SHORT[:3]))


def test_a_graph_that_answers_with_something_else_is_refused(tmp_path: Path) -> None:
    with make_engine(tmp_path) as engine:
        for graph in ({SHORT[0]: SHORT[1]}, lambda text: [3]):
            with pytest.raises(ConfigError, match="give a list of texts"):
                engine.build_kv_cache(SHORT[:2], neighbours=graph, progress=False)  # type: ignore[arg-type]


def test_one_prompts_memory_is_let_go_before_the_next_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where none is kept for the next: two prompts' would be gigabytes with a large model."""
    monkeypatch.setattr(prompt_prefill, "_KEPT_BYTES", 0)
    made, alive, real = list[StorageWeakRef](), list[int](), prompt_prefill.FusedCache

    def noted(*arguments: Any) -> FusedCache:
        alive.append(sum(not one.expired() for one in made))
        cache = real(*arguments)
        made.append(StorageWeakRef(cache.keys.untyped_storage()))
        return cache

    monkeypatch.setattr(prompt_prefill, "FusedCache", noted)
    with make_engine(tmp_path, preprocessing_prompts=4) as engine:
        ingest(engine, SHORT)
    assert len(alive) > 3
    assert not any(alive)


def test_contexts_are_cut_to_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, real = [], PromptPrefill.true_kv

    def noted(self: PromptPrefill, ids: Sequence[int], *rest: Any) -> object:
        lengths.append(len(ids))
        return real(self, ids, *rest)

    monkeypatch.setattr(PromptPrefill, "true_kv", noted)
    long = [f"{name} " + "the ferry sails to the island " * 100 for name in ("Alpha", "Beta", "Gamma", "Delta")]
    with make_engine(tmp_path, num_neighbours=3) as engine:
        report = ingest(engine, long)
        assert (report.chunks_new, report.chunks_preprocessed) == (4, 4)
        assert engine.generate(long[0] + " When?", max_tokens=1).report.chunks_found == 1
        assert 0 < max(lengths) <= engine._parts.context_length


def test_a_neighbour_that_does_not_fit_is_left_out_and_the_next_one_is_not(tmp_path: Path) -> None:
    long = [f"{name} " + "the ferry sails to the island " * 200 for name in ("Alpha", "Beta")]
    with make_engine(tmp_path, num_neighbours=3, preprocessing="fusionrag") as engine:
        assert 1 < engine._parts.context_length / len(engine.token_ids(long[0])) < 2
        graph = {SHORT[0]: [*long, SHORT[1]]}
        engine.build_kv_cache([*long, *SHORT[:2]], neighbours=graph, preprocess="later", progress=False)
        assert engine.corpus._preprocessor is not None
        plan = engine.corpus._preprocessor.plan(lambda: False, refresh=False)
        (contexts,) = (chunk.contexts for chunk in plan.chunks if chunk.text == SHORT[0])
        assert contexts == ((str(engine.chunk_id(long[0])), str(engine.chunk_id(SHORT[1]))),)


def test_plain_kv_is_kept_within_its_budget() -> None:
    from fused_kv_llm.chunk import ChunkKV

    asked: list[str] = []

    def compute(texts: Sequence[str]) -> list[ChunkKV]:
        asked.extend(texts)
        return [ChunkKV(torch.zeros(1, 1, 10, 4), torch.zeros(1, 1, 10, 4), tuple(range(10)), 0) for _ in texts]

    cache = PlainKVCache(compute, max_bytes=3 * 320)
    assert list(cache.get(["a", "b"])) == ["a", "b"]
    cache.get(["b", "c"])
    cache.get(["d"])
    cache.get(["b", "c"])
    assert asked == ["a", "b", "c", "d"], "the least recently used goes first"
    assert len(cache.get(["a", "b", "c", "d", "e"])) == 5, "one call gets what it asks for, whatever the budget"


@pytest.mark.real_model
@pytest.mark.heavy
def test_stored_kv_comes_closer_to_full_prefill(tmp_path: Path) -> None:
    """In a prompt whose chunks are of several groups, and in another order."""
    off: dict[tuple[str, str], float] = {}
    for preprocessing in ("none", "similar"):
        options = {"dtype": "float32", "preprocessing": preprocessing, "store_misses": False}
        with FusedKVEngine("smollm2-135m", kv_dir=tmp_path / "kv", **options) as engine:
            ingest(engine, SHORT[:48])
            kv = [engine.prefill(rag_prompt(SHORT[1:48:12]), recompute_ratio=ratio)[0] for ratio in (0.0, 1.0)]
            length = kv[1].cache.length
            for name in ("keys", "values"):
                reused, full = (getattr(one.cache, name)[:, :, :, :length] for one in kv)
                off[preprocessing, name] = float((reused - full).square().sum())
            for one in kv:
                one.cache.release()
    for name in ("keys", "values"):
        assert off["similar", name] < 0.6 * off["none", name], off


@pytest.mark.real_model
def test_the_default_embedder_knows_what_is_similar() -> None:
    texts = [
        "The cat sat on the mat and purred all afternoon.",
        "A kitten was sleeping on the rug, purring softly.",
        "Interest rates rose by half a point in the last quarter.",
        "The central bank raised its key rate to fight inflation.",
    ]
    found = find_neighbours(texts, texts, 1, SentenceEmbedder(), None)
    assert [texts.index(found[text][0]) for text in texts] == [1, 0, 3, 2]


def test_the_second_pass_leaves_the_memory_of_requests_alone(tmp_path: Path) -> None:
    with make_engine(tmp_path, memory_bytes=1 << 16) as engine:
        engine.build_kv_cache(SHORT, preprocess="later", progress=False)
        key = str(engine.chunk_id(SHORT[0]))
        stored = engine.store.open(key, engine.token_ids(SHORT[0]))
        assert stored is not None
        with stored:
            stored.load_layers(0, stored.num_layers)
        assert ingest(engine, SHORT).chunks_preprocessed == len(SHORT)
        assert key in engine.store.resident()
