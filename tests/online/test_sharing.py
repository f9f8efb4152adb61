"""Shared pages: a request that decodes over views of them gets the logits that its private copy gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from corpus import SHORT, rag_prompt
from models import smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_llm import FusedKVEngine, FusionReport
from fused_kv_llm.kv import PagePool
from fused_kv_llm.model import ForwardPass, FusedCache, RaggedPart, ViewCache, forward_ragged
from fused_kv_llm.online import Fusion, Recipe, Sharing
from fused_kv_llm.selectors import resolve_selector

ANSWER = 24
PROMPTS = {
    "chunks": rag_prompt(SHORT[:5]),
    "one_twice": rag_prompt([SHORT[1], SHORT[0], SHORT[2], SHORT[0]]),
    # Their first and last tokens are others beside letters, so they stand in the prompt without their edges.
    "partial": f"{SHORT[3]}s\n\nHere {SHORT[0]} {SHORT[2]}n\n\nWhat about it?",
    "none_behind": f"What about it?\n\n{SHORT[2]}\n\n{SHORT[4]}",
}


def make_engine(folder: Path, **options: Any) -> FusedKVEngine:
    engine = FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, dtype="float32", **options)
    engine.build_kv_cache(SHORT[:6], preprocess="wait", progress=False)
    return engine


@pytest.fixture(scope="module", params=[("similar", "auto"), ("similar", "int8"), ("none", "auto")], ids=str)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    preprocessing, kv_dtype = request.param
    with make_engine(
        tmp_path_factory.mktemp("sharing"), preprocessing=preprocessing, kv_dtype=kv_dtype, wrap_chat_template=False
    ) as made:
        yield made


def fused(
    engine: FusedKVEngine, prompt: str, recipe: Recipe, *, shared: bool, max_rows: int | None = None
) -> tuple[FusedCache, Tensor]:
    """Return a prompt's KV, shared or not, and the logits after it."""
    cache, logits, sharing = complete(engine, prompt, recipe, max_rows)
    with closing(sharing.fusion):
        if shared:
            own_nbytes, most = sharing.offer.own_nbytes, cache.get_max_length()
            cache, pages_nbytes = sharing.offer.share()
            assert isinstance(cache, ViewCache)
            assert cache.get_max_length() == most
            # Hidden tokens are left out of the estimate, vectors are taken to be there.
            assert 0.9 * own_nbytes <= cache.nbytes <= 1.1 * own_nbytes
            assert 0 < pages_nbytes <= engine.requests.context.pages.nbytes
    return cache, logits


class Open(NamedTuple):
    """A fusion that is not closed yet, and what sharing would bring."""

    fusion: Fusion
    offer: Sharing


class Complete(NamedTuple):
    """A prompt whose KV is complete, and whose chunks are open."""

    cache: FusedCache
    logits: Tensor
    sharing: Open


def complete(engine: FusedKVEngine, prompt: str, recipe: Recipe, max_rows: int | None = None) -> Complete:
    report = FusionReport()
    request = engine.requests.planner.plan(prompt, report)
    fusion = Fusion(engine.requests.context, request, recipe, request.num_tokens + ANSWER, report)
    with torch.inference_mode():
        fusion.begin()
        fusion.select()
        found = None
        while found is None:
            (logits,) = forward_ragged(engine.loaded, [fusion.next_slice(max_rows)])
            report.seconds["fuse"] = 0.0
            found = fusion.computed(logits)
    offer = fusion.sharing()
    assert offer is not None
    assert not fusion.why_private
    return Complete(found.cache, found.logits, Open(fusion, offer))


def step(engine: FusedKVEngine, caches: list[FusedCache], tokens: list[int]) -> list[Tensor]:
    """Decode one token of each request in one pass."""
    parts = [
        RaggedPart(torch.tensor([token]), cache, ForwardPass(torch.tensor([cache.length]), cache.length + 1))
        for cache, token in zip(caches, tokens, strict=True)
    ]
    with torch.inference_mode():
        logits = forward_ragged(engine.loaded, parts)
    for cache in caches:
        cache.length += 1
    return logits


@pytest.mark.parametrize("max_rows", [None, 24], ids=["whole", "slices"])
@pytest.mark.parametrize("ratio", [0.0, 0.15, 0.5])
@pytest.mark.parametrize("name", list(PROMPTS))
def test_views_decode_as_a_private_copy(engine: FusedKVEngine, name: str, ratio: float, max_rows: int | None) -> None:
    recipe = Recipe(resolve_selector("sink_attention"), ratio)
    private, want = fused(engine, PROMPTS[name], recipe, shared=False)
    shared, got = fused(engine, PROMPTS[name], recipe, shared=True, max_rows=max_rows)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    for _ in range(ANSWER):
        token = int(want.argmax())
        assert token == int(got.argmax())
        (want,), (got,) = (step(engine, [cache], [token]) for cache in (private, shared))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    shared.release()
    private.release()
    assert len(engine.requests.context.pages) == 0


def test_prompts_have_what_they_are_named_after(engine: FusedKVEngine) -> None:
    with engine.requests.planner.plan(PROMPTS["partial"], FusionReport()) as request:
        shown = [(chunk.inside, chunk.stored.num_tokens) for chunk in request.chunks]
        assert any(inside.start > 0 for inside, _ in shown)
        assert any(inside.stop < tokens for inside, tokens in shown)
    with engine.requests.planner.plan(PROMPTS["one_twice"], FusionReport()) as request:
        assert len({chunk.stored.key for chunk in request.chunks}) == len(request.chunks) - 1
    with engine.requests.planner.plan(PROMPTS["none_behind"], FusionReport()) as request:
        assert request.chunks[-1].segment.stop == request.num_tokens


@pytest.mark.parametrize("selector", ["sink_attention", "qcfuse", "fusionrag", "random"])
def test_private_copies_and_views_decode_in_one_pass(engine: FusedKVEngine, selector: str) -> None:
    recipe, names = Recipe(resolve_selector(selector), 0.2), list(PROMPTS)
    want = {name: fused(engine, PROMPTS[name], recipe, shared=False) for name in names}
    # Views and copies by turns: the pass puts them into its own order.
    got = {name: fused(engine, PROMPTS[name], recipe, shared=number % 2 == 0) for number, name in enumerate(names)}
    logits = {name: one[1] for name, one in want.items()}
    for _ in range(8):
        tokens = {name: int(one.argmax()) for name, one in logits.items()}
        together = step(engine, [got[name][0] for name in names], [tokens[name] for name in names])
        for name, one in zip(names, together, strict=True):
            (logits[name],) = step(engine, [want[name][0]], [tokens[name]])
            torch.testing.assert_close(one, logits[name], atol=1e-4, rtol=1e-4)
    for caches in (want, got):
        for cache, _ in caches.values():
            cache.release()


def test_pages_live_as_long_as_a_request_sees_them(engine: FusedKVEngine) -> None:
    recipe, pages = Recipe(resolve_selector("sink_attention"), 0.15), engine.requests.context.pages
    first, _ = fused(engine, PROMPTS["chunks"], recipe, shared=True)
    nbytes, count = pages.nbytes, len(pages)
    assert count == 5
    second = complete(engine, PROMPTS["chunks"], recipe)
    with closing(second.sharing.fusion):
        assert set(second.sharing.offer.new_pages().values()) == {0}
        other, _ = second.sharing.offer.share()
    assert (pages.nbytes, len(pages)) == (nbytes, count)
    first.release()
    assert (pages.nbytes, len(pages)) == (nbytes, count)
    other.release()
    assert pages.nbytes == len(pages) == 0


def test_new_pages_are_as_large_as_was_said(engine: FusedKVEngine) -> None:
    prompt = complete(engine, PROMPTS["one_twice"], Recipe(resolve_selector("sink_attention"), 0.15))
    with closing(prompt.sharing.fusion):
        said = prompt.sharing.offer.new_pages()
        cache, nbytes = prompt.sharing.offer.share()
    assert sum(said.values()) == nbytes == engine.requests.context.pages.nbytes
    cache.release()


def test_a_failed_page_leaves_the_private_copy_as_it_was(
    engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    private, logits, sharing = complete(engine, PROMPTS["chunks"], Recipe(resolve_selector("sink_attention"), 0.15))

    def broken(*args: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(PagePool, "take", broken)
    with closing(sharing.fusion), pytest.raises(RuntimeError, match="no memory"):
        sharing.offer.share()
    assert torch.isfinite(step(engine, [private], [int(logits.argmax())])[0]).all()
    private.release()
