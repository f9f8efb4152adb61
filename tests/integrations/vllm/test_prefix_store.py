"""Spans in a store: what is found, what is compared, and what becomes of damage."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from integrations.vllm.requests import PROMPT, block_caches, identity, spans

from fused_kv_llm.chunk import ContentHash
from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.store import KVStore
from fused_kv_vllm.prefix_store import PrefixStore
from fused_kv_vllm.spans import PrefixSpan

LAYOUT = identity().layout


def fill(store: PrefixStore, wanted: list[PrefixSpan] | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    source = block_caches(3)
    written = [source.gather([2 * n, 2 * n + 1]) for n in range(len(wanted or spans()))]
    for span, kv in zip(wanted or spans(), written, strict=True):
        store.write(span, *kv)
    return written


def file_of(kv_dir: Path, span: PrefixSpan) -> Path:
    return kv_dir / "chunks" / span.key[:2] / f"{span.key}.safetensors"


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_what_is_written_is_read_bit_for_bit_by_another_process(kv_dir: Path, store: PrefixStore) -> None:
    written = fill(store)
    other = PrefixStore(KVStore(kv_dir, memory_bytes=0))
    assert other.known(spans()) == 3
    for span, kv in zip(spans(), written, strict=True):
        read = other.read(span, LAYOUT)
        assert read is not None
        assert all(torch.equal(one, two) for one, two in zip(read, kv, strict=True))
    other.close()


def test_a_span_is_written_once(store: PrefixStore) -> None:
    keys, values = block_caches().gather([0, 1])
    assert store.write(spans()[0], keys, values) > keys.nbytes + values.nbytes
    assert store.write(spans()[0], keys, values) == 0


def test_only_spans_without_a_gap_before_them_are_known(store: PrefixStore) -> None:
    assert store.known(spans()) == 0
    fill(store, [spans()[0], spans()[2]])
    assert store.known(spans()) == 1
    fill(store, [spans()[1]])
    assert store.known(spans()) == 3


@pytest.mark.parametrize(
    "foreign",
    [{"token_ids": tuple(reversed(spans()[1].token_ids))}, {"start": 0}, {"identity": "another"}],
)
def test_a_hit_has_the_same_tokens_place_and_identity(store: PrefixStore, foreign: dict[str, object]) -> None:
    """A file under a span's key that holds something else is none of its KV, as if hashes had collided."""
    fill(store, [spans()[0], replace(spans()[1], **foreign)])  # type: ignore[arg-type]
    assert store.known(spans()) == 1
    with pytest.warns(FusedKVWarning, match="cannot be used"):
        assert store.read(spans()[1], LAYOUT) is None


def test_kv_of_another_shape_is_no_hit(store: PrefixStore) -> None:
    fill(store)
    with pytest.warns(FusedKVWarning, match="not the span of a prefix"):
        assert store.read(spans()[0], replace(LAYOUT, layers=2)) is None


@pytest.mark.parametrize("offset", [40, -1])
def test_a_damaged_file_is_a_miss_and_a_warning_and_is_written_again(
    kv_dir: Path, store: PrefixStore, offset: int
) -> None:
    written = fill(store)
    flip(file_of(kv_dir, spans()[1]), offset)
    other = PrefixStore(KVStore(kv_dir, memory_bytes=0))
    with pytest.warns(FusedKVWarning, match="computed afresh"):
        assert other.read(spans()[1], LAYOUT) is None
    assert other.known(spans()) == 1
    assert other.write(spans()[1], *written[1]) > 0
    read = other.read(spans()[1], LAYOUT)
    assert read is not None
    assert torch.equal(read[0], written[1][0])
    other.close()


def test_a_truncated_file_is_a_miss(kv_dir: Path, store: PrefixStore) -> None:
    fill(store)
    path = file_of(kv_dir, spans()[0])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.warns(FusedKVWarning, match="computed afresh"):
        assert store.read(spans()[0], LAYOUT) is None


def test_a_store_that_is_gone_is_a_miss_and_does_not_stop_anything(kv_dir: Path, store: PrefixStore) -> None:
    written = fill(store)
    shutil.rmtree(kv_dir)
    with pytest.warns(FusedKVWarning):
        assert store.read(spans()[0], LAYOUT) is None
    with pytest.warns(FusedKVWarning, match="computed again"):
        assert store.write(spans([1, *PROMPT])[0], *written[0]) == 0


def test_a_closed_store_is_a_miss(store: PrefixStore) -> None:
    fill(store)
    store.close()
    with pytest.warns(FusedKVWarning, match="looked up"):
        assert store.known(spans()) == 0
    with pytest.warns(FusedKVWarning, match="cannot be read"):
        assert store.read(spans()[0], LAYOUT) is None


def test_a_full_store_is_a_warning(tmp_path: Path) -> None:
    small = PrefixStore(KVStore(tmp_path / "small", memory_bytes=0, disk_bytes=1000))
    with pytest.warns(FusedKVWarning, match="cannot be stored"):
        fill(small, spans()[:1])
    assert small.known(spans()) == 0
    small.close()


def test_an_engine_finds_nothing_of_spans(kv_dir: Path, store: PrefixStore) -> None:
    fill(store)
    with KVStore(kv_dir, memory_bytes=0) as plain:
        row = plain.rows([spans()[0].key])[spans()[0].key]
        assert row.text == ""
        assert plain.namespaces.holding(ContentHash(1, 2, 32), [row.identity]) == set()
        assert plain.check().findings == []
