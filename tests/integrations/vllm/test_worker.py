"""Spans between a store and the caches, beside the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from integrations.vllm.requests import block_caches, spans

from fused_kv_llm.errors import FusedKVWarning
from fused_kv_vllm.prefix_store import PrefixStore
from fused_kv_vllm.transfers import LoadRequest, SpanBlocks
from fused_kv_vllm.worker import PrefixWorker

SAVES = [SpanBlocks(span, (2 * n, 2 * n + 1)) for n, span in enumerate(spans())]
LOADS = LoadRequest("a", tuple(SpanBlocks(span, (20 + 2 * n, 21 + 2 * n)) for n, span in enumerate(spans())))


@pytest.fixture
def worker(store: PrefixStore) -> Iterator[PrefixWorker]:
    made = PrefixWorker(store, block_caches(1), 64)
    yield made
    made.close()


def wait_for(worker: PrefixWorker) -> set[str]:
    begun = time.monotonic()
    while not (found := worker.finished(is_idle=True)):
        assert time.monotonic() - begun < 30
    return found


def test_blocks_go_to_the_store_and_into_the_caches_of_another(store: PrefixStore, worker: PrefixWorker) -> None:
    worker.save(SAVES)
    worker.close()
    target = block_caches(2)
    other = PrefixWorker(store, target, 64)
    assert other.finished(is_idle=True) == set()
    other.begin([LOADS])
    assert wait_for(other) == {"a"}
    assert other.take_unread() == set()
    wanted, found = block_caches(1).gather(range(6)), target.gather(range(20, 26))
    assert all(torch.equal(one, two) for one, two in zip(wanted, found, strict=True))
    assert other.finished(is_idle=False) == set()
    other.close()


def test_a_span_is_copied_before_its_blocks_change(store: PrefixStore) -> None:
    caches = block_caches(1)
    wanted = caches.gather([0, 1])
    worker = PrefixWorker(store, caches, 64)
    worker.save(SAVES[:1])
    caches.scatter(*caches.gather([8, 9]), [0, 1])
    worker.close()
    read = store.read(spans()[0], caches.layout)
    assert read is not None
    assert torch.equal(read[0], wanted[0])


def test_what_cannot_be_read_is_told_by_its_blocks(kv_dir: Path, store: PrefixStore, worker: PrefixWorker) -> None:
    worker.save(SAVES)
    worker.close()
    for damaged in (spans()[1].key, spans()[2].key):
        path = kv_dir / "chunks" / damaged[:2] / f"{damaged}.safetensors"
        # A file of its own: one that is written twice within a tick of the clock looks unchanged.
        other_file = path.with_suffix(".damaged")
        other_file.write_bytes(path.read_bytes()[:-1] + b"\x7f")
        other_file.replace(path)
    target = block_caches(2)
    other = PrefixWorker(store, target, 64)

    def loaded() -> set[str]:
        # It may read, and warn, as soon as it has begun.
        other.begin([LOADS])
        return wait_for(other)

    with pytest.warns(FusedKVWarning, match="computed afresh"):
        assert loaded() == {"a"}
    # Both are out of the store, so that both are stored again.
    other.save(SAVES)
    # What stands behind a gap is of no use either.
    assert other.take_unread() == {22, 23, 24, 25}
    assert other.take_unread() == set()
    assert torch.equal(target.gather([20, 21])[0], block_caches(1).gather([0, 1])[0])
    assert torch.equal(target.gather([22, 23])[0], block_caches(2).gather([22, 23])[0])
    other.close()
    for span in spans():
        assert store.read(span, target.layout) is not None


def test_a_store_that_is_too_slow_is_written_less(store: PrefixStore) -> None:
    worker = PrefixWorker(store, block_caches(1), 1)
    worker.save(SAVES)
    assert worker.not_written == 2
    worker.close()
    assert store.known(spans()) == 1
