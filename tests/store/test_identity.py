"""A chunk's KV is found only under everything it depends on."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from fused_kv_llm.chunk import KVIdentity, chunk_key

BASE = KVIdentity("weights", "tokenizer", "bfloat16", "rope", "prefix", "similar:3", "auto", "tenant", 2)


@pytest.mark.parametrize("field", [field.name for field in fields(KVIdentity)])
def test_any_other_field_is_a_miss(store, make_chunk, field):
    chunk = make_chunk()
    ids = chunk.kv.token_ids
    key = chunk_key(BASE.digest, ids)
    store.put(key, BASE.digest, chunk.text, chunk.content, chunk.kv)
    value = getattr(BASE, field)
    other = replace(BASE, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert other.digest != BASE.digest
    assert store.open(chunk_key(other.digest, ids), ids) is None
    assert store.keys(other.digest) == []
    assert store.contains([chunk_key(other.digest, ids)]) == set()
    assert store.open(key, ids) is not None


def test_fields_do_not_run_together():
    """No two identities share a digest because one field's end looks like the next one's beginning."""
    assert replace(BASE, model="ab", tokenizer="c").digest != replace(BASE, model="a", tokenizer="bc").digest
    assert replace(BASE, prefix="", tenant="prefix").digest != replace(BASE, prefix="prefix", tenant="").digest


def test_token_ids_are_in_the_key():
    keys = [chunk_key(BASE.digest, ids) for ids in ([1, 2, 3], [1, 2], [12, 3], [1], [])]
    assert len(set(keys)) == len(keys)
