"""How many variants are kept, and which make room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fused_kv_llm.chunk import ChunkKV, chunk_key
from fused_kv_llm.errors import VariantDamagedError
from fused_kv_llm.prompt import content_hash
from fused_kv_llm.store import KVStore, VariantRecord, Variants, variant_name

_TOKENS = 12
_ALL = (0, _TOKENS)


def put_chunk(store: KVStore, seed: int) -> str:
    ids = tuple(range(seed, seed + _TOKENS))
    key = chunk_key("identity", ids)
    kv = ChunkKV(*torch.randn(2, 3, 2, _TOKENS, 4).unbind(), ids, 5)
    text = f"chunk number {seed} " * 5
    store.put(key, "identity", text, content_hash(text), kv)
    return key


def record_of(*prefix: str, position: int = 40) -> VariantRecord:
    count = len(prefix)
    return VariantRecord(
        prefix,
        torch.full((count,), 9),
        torch.rand(3, count),
        torch.rand(3),
        torch.rand(_TOKENS),
        position,
        (0, _TOKENS),
    )


def put(variants: Variants, key: str, *prefix: str) -> int:
    return variants.put(key, record_of(*prefix), *torch.randn(2, 3, 2, _TOKENS, 4).unbind(), "float32")


def test_a_record_comes_back_as_it_was_written(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        key, other = put_chunk(store, 0), put_chunk(store, 100)
        variants = Variants(store.sidecars, 2, None)
        want = record_of(other, "ab" * 32)
        keys, values = torch.randn(2, 3, 2, _TOKENS, 4).unbind()
        assert variants.put(key, want, keys, values, "float32") > 0
        assert variants.put(key, want, keys, values, "float32") == 0
        assert variants.names(key) == [variant_name([other, "ab" * 32])]
        got = variants.record(key, want.name)
        assert (got.prefix, got.position, got.covered) == (want.prefix, want.position, want.covered)
        for name, tensor in want.tensors().items():
            assert torch.equal(got.tensors()[name], tensor)
        plain = store.open(key, tuple(range(_TOKENS)))
        assert plain is not None
        with plain, variants.open(plain, got) as opened:
            assert opened.key != key
            assert opened.position == 40
            assert all(map(torch.equal, opened.read_layers(0, 3), (keys, values)))


def test_the_lowest_sum_of_one_over_cfo_goes_first_within_a_chunk(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        key = put_chunk(store, 0)
        variants = Variants(store.sidecars, 2, None)
        for prefix in ("11" * 32, "22" * 32):
            put(variants, key, prefix)
        variants.used(key, variant_name(["11" * 32]), 0.1, _TOKENS)
        # Used more often, but much of it had to be fixed.
        for _ in range(3):
            variants.used(key, variant_name(["22" * 32]), 0.5, _TOKENS)
        put(variants, key, "33" * 32)
        assert set(variants.names(key)) == {variant_name([one * 32]) for one in ("11", "33")}


def test_no_chunk_makes_room_for_a_variant_and_the_budget_holds(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        keys = [put_chunk(store, 100 * number) for number in range(4)]
        one = put(Variants(store.sidecars, 9, None), keys[0], "11" * 32)
    with KVStore(tmp_path) as store:
        variants = Variants(store.sidecars, 9, int(2.5 * one))
        for key in keys:
            for prefix in ("11" * 32, "22" * 32, "33" * 32):
                put(variants, key, prefix)
                assert variants.usage()[1] <= 2.5 * one
        assert variants.usage()[0] == 2
        assert store.contains(keys) == set(keys)
        assert put(Variants(store.sidecars, 9, one // 2), keys[0], "44" * 32) == 0
        taken = store.stats().tiers["disk"][1]
    with KVStore(tmp_path, disk_bytes=taken + one // 2) as store:
        # The disk budget is full of chunks: variants make room for each other only.
        variants = Variants(store.sidecars, 9, None)
        assert put(variants, keys[0], "55" * 32) > 0
        assert variants.usage()[0] == 2
        assert store.contains(keys) == set(keys)
    with KVStore(tmp_path) as store:
        for key, name in list(store.sidecars.sizes("variant-")):
            store.sidecars.remove(key, name)
        taken = store.stats().tiers["disk"][1]
    with KVStore(tmp_path, disk_bytes=taken + one // 2) as store:
        assert put(Variants(store.sidecars, 9, None), keys[0], "55" * 32) == 0
        assert store.contains(keys) == set(keys)


def test_a_variant_of_another_shape_or_place_is_damaged(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        key = put_chunk(store, 0)
        variants = Variants(store.sidecars, 2, None)
        record = record_of("11" * 32)
        variants.put(key, record, *torch.randn(2, 2, 2, _TOKENS, 4).unbind(), "float32")
        plain = store.open(key, tuple(range(_TOKENS)))
        assert plain is not None
        with plain:
            with pytest.raises(VariantDamagedError, match="not shaped"):
                variants.open(plain, record)
            put(variants, key, "22" * 32)
            moved = variants.open(plain, record_of("22" * 32, position=41))
            with moved, pytest.raises(VariantDamagedError, match="record"):
                moved.read_layers(0, 1)


def test_a_discarded_variant_is_not_used_in_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        key = put_chunk(store, 0)
        put(Variants(store.sidecars, 2, None), key, "11" * 32)
    with KVStore(tmp_path, read_only=True) as store:
        variants = Variants(store.sidecars, 2, None)
        (name,) = variants.names(key)
        variants.discard(key, name)
        assert variants.names(key) == []


def test_variants_go_with_their_chunk(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        key = put_chunk(store, 0)
        variants = Variants(store.sidecars, 2, None)
        put(variants, key, "11" * 32)
        store.delete([key])
        assert variants.usage() == (0, 0)
        assert not list(tmp_path.rglob("*variant*"))
