"""Prompts that an engine hands over: their KV, who finds it, and who does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from integrations.vllm.requests import BLOCK, HEADS, LAYERS, SPAN_BLOCKS, WIDTH, caches, first_step, identity, request
from models import smollm2_tokenizer, tiny_model
from torch import Tensor

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.passages import Passage
from fused_kv_llm.errors import PromptError, UnsupportedModelError
from fused_kv_llm.store import KVStore
from fused_kv_vllm import HandedPrompt, hand_over
from fused_kv_vllm.blocks import BlockCaches, BlockLayout
from fused_kv_vllm.handed import handed_identity, handed_key
from fused_kv_vllm.model_files import fingerprint_model_files, model_path
from fused_kv_vllm.prefix_store import PrefixStore
from fused_kv_vllm.scheduling import PrefixScheduler
from fused_kv_vllm.spans import PrefixSpan
from fused_kv_vllm.transfers import LoadRequest, SpanBlocks
from fused_kv_vllm.worker import PrefixWorker


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KVStore]:
    with KVStore(tmp_path_factory.mktemp("handed"), memory_bytes=0) as made:
        yield made


@pytest.fixture(scope="module")
def prompt(passages: list[Passage]) -> str:
    return f"{passages[0].text}\n\n{passages[1].text}\n\nWhich ferry is the largest?"


@pytest.fixture(scope="module")
def handed(engine: FusedKVEngine, plain: KVStore, prompt: str) -> HandedPrompt:
    return hand_over(engine, prompt, plain, recompute_ratio=0.15)


@pytest.fixture
def scheduler(engine: FusedKVEngine, plain: KVStore) -> PrefixScheduler:
    made = PrefixScheduler(PrefixStore(plain), BLOCK, SPAN_BLOCKS)
    made.identity, made.handed_identity = identity(), digest_of(engine)
    return made


def digest_of(engine: FusedKVEngine) -> str:
    files = fingerprint_model_files(model_path(engine.model.name_or_path))
    return handed_identity(files, str(engine.loaded.dtype).removeprefix("torch.")).digest


def blocks_of(handed: HandedPrompt) -> list[int]:
    return list(range(len(handed.token_ids) // BLOCK + 1))


def test_the_kv_of_all_but_the_last_token_is_stored(
    engine: FusedKVEngine, plain: KVStore, prompt: str, handed: HandedPrompt
) -> None:
    assert handed.token_ids == engine.encode(prompt)
    assert handed.report.reused_tokens > 0
    key = handed_key(handed.cache_salt)
    assert key is not None
    again, _ = engine.prefill(prompt, recompute_ratio=0.15)
    with plain.open(key, handed.token_ids[:-1]) as stored:  # type: ignore[union-attr]
        keys, values = stored.read_layers(0, stored.num_layers)
        assert '"recompute_ratio": 0.15' in stored.header.text
    count = len(handed.token_ids) - 1
    torch.testing.assert_close(keys, again.cache.keys[:, 0, :, :count])
    torch.testing.assert_close(values, again.cache.values[:, 0, :, :count])
    again.cache.release()


def test_what_was_fused_otherwise_has_another_salt(
    engine: FusedKVEngine, plain: KVStore, prompt: str, handed: HandedPrompt
) -> None:
    other = hand_over(engine, prompt, plain, recompute_ratio=0.5)
    assert other.token_ids == handed.token_ids
    assert other.cache_salt != handed.cache_salt


def test_vllm_computes_the_last_token_only(scheduler: PrefixScheduler, handed: HandedPrompt) -> None:
    asked = request("a", handed.token_ids, cache_salt=handed.cache_salt)
    count = len(handed.token_ids) - 1
    assert scheduler.matched(asked, 0) == count
    scheduler.allocated(asked, blocks_of(handed), count)
    step = scheduler.step(first_step("a", blocks_of(handed), count, 1))
    ((one,),) = (load.spans for load in step.loads)
    assert one.span.is_handed
    assert len(one.blocks) == -(-count // BLOCK)
    assert step.saves == ()


@pytest.mark.parametrize("salt", [None, "alice", "fused-kv:", "fused-kv:" + "0" * 64])
def test_nobody_else_finds_it(scheduler: PrefixScheduler, handed: HandedPrompt, salt: str | None) -> None:
    assert scheduler.matched(request("a", handed.token_ids, cache_salt=salt), 0) == 0


def test_other_tokens_do_not_find_it(scheduler: PrefixScheduler, handed: HandedPrompt) -> None:
    changed = [handed.token_ids[0] + 1, *handed.token_ids[1:]]
    longer = [*handed.token_ids, 5]
    for number, ids in enumerate((changed, longer)):
        assert scheduler.matched(request(str(number), ids, cache_salt=handed.cache_salt), 0) == 0


def test_another_model_does_not_find_it(scheduler: PrefixScheduler, handed: HandedPrompt) -> None:
    asked = request("a", handed.token_ids, cache_salt=handed.cache_salt)
    scheduler.handed_identity = handed_identity("0" * 32, "bfloat16").digest
    assert scheduler.matched(asked, 0) == 0


def test_what_is_computed_after_it_is_not_stored(scheduler: PrefixScheduler, handed: HandedPrompt) -> None:
    """Whether or not its KV could be loaded."""
    asked = request("a", handed.token_ids, cache_salt=handed.cache_salt)
    scheduler.matched(asked, 0)
    step = scheduler.step(first_step("a", blocks_of(handed), 0, len(handed.token_ids)))
    assert step.saves == ()


def test_a_server_that_may_compute_something_else_takes_none(scheduler: PrefixScheduler, handed: HandedPrompt) -> None:
    scheduler.handed_identity = None
    asked = request("a", handed.token_ids, cache_salt=handed.cache_salt)
    assert scheduler.matched(asked, 0) == 0
    assert scheduler.step(first_step("a", blocks_of(handed), 0, len(handed.token_ids))).saves == ()


def test_keys_and_values_are_written_slot_by_slot(store: PrefixStore) -> None:
    made = caches(2)
    token_ids = tuple(range(10))
    span = PrefixSpan("a" * 64, "handed", 0, token_ids, is_handed=True)
    keys, values = (torch.randn(LAYERS, HEADS, 10, WIDTH // 2).to(torch.bfloat16) for _ in range(2))
    store.write(span, keys, values)

    def write(name: str, k: Tensor, v: Tensor, slots: Tensor) -> None:
        made[name][slots // BLOCK, :, slots % BLOCK] = torch.cat((k, v), dim=2)

    before = made["model.layers.0.attn"].clone()
    worker = PrefixWorker(store, BlockCaches(made, BLOCK, "PLAIN", write), 8)
    worker.begin([LoadRequest("a", (SpanBlocks(span, (7, 3), skipped=1),))])
    while not worker.finished(is_idle=True):
        pass
    assert worker.take_unread() == set()
    worker.close()
    for number, cache in enumerate(made.values()):
        for token, (block, slot) in {4: (7, 0), 7: (7, 3), 8: (3, 0), 9: (3, 1)}.items():
            assert torch.equal(cache[block, :, slot], torch.cat((keys, values), dim=3)[number, :, token])
    changed = (made["model.layers.0.attn"] != before).any(3).any(1).nonzero().tolist()
    assert changed == [[3, 0], [3, 1], [7, 0], [7, 1], [7, 2], [7, 3]]


def test_a_backend_that_cannot_be_written_to_has_it_computed(store: PrefixStore) -> None:
    span = PrefixSpan("a" * 64, "handed", 0, tuple(range(4)), is_handed=True)
    store.write(span, *(torch.zeros(LAYERS, HEADS, 4, WIDTH // 2, dtype=torch.bfloat16) for _ in range(2)))
    worker = PrefixWorker(store, BlockCaches(caches(), BLOCK, "PLAIN"), 8)
    worker.begin([LoadRequest("a", (SpanBlocks(span, (7,)),))])
    while not worker.finished(is_idle=True):
        pass
    assert worker.take_unread() == {7}
    worker.close()


def test_another_shape_is_no_hit(handed: HandedPrompt, plain: KVStore, engine: FusedKVEngine) -> None:
    key = handed_key(handed.cache_salt)
    assert key is not None
    span = PrefixSpan(key, digest_of(engine), 0, tuple(handed.token_ids[:-1]), is_handed=True)
    fits = BlockLayout("PLAIN", str(engine.loaded.dtype).removeprefix("torch."), 30, 3, BLOCK, 128)
    assert PrefixStore(plain).read(span, fits) is not None
    with pytest.warns(match="not the span of a prefix"):
        assert PrefixStore(plain).read(span, replace(fits, dtype="float16")) is None


@pytest.mark.parametrize(("kind", "message"), [("llama", "not that of its files"), ("qwen3", "of type 'qwen3'")])
def test_models_that_vllm_would_not_have_are_refused(plain: KVStore, tmp_path: Path, kind: str, message: str) -> None:
    model = tiny_model(kind)
    with (
        FusedKVEngine(model, tokenizer=smollm2_tokenizer(), kv_dir=tmp_path) as engine,
        pytest.raises(UnsupportedModelError, match=message),
    ):
        hand_over(engine, "Which ferry is the largest?", plain)


def test_one_token_is_refused(plain: KVStore, tmp_path: Path) -> None:
    with (
        FusedKVEngine("smollm2-135m", kv_dir=tmp_path, wrap_chat_template=False) as engine,
        pytest.raises(PromptError, match="one token"),
    ):
        hand_over(engine, "a", plain)
