"""Why chunks have gone is known for the newest ones, and what is written down of a namespace has no tenant."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fused_kv_llm.chunk import KVIdentity
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.index.database import Database
from fused_kv_llm.store.index.departures import Departures
from fused_kv_llm.store.index.ledger import LEDGER_SCHEMA

IDENTITY = KVIdentity("model", "tokenizer", "float32", "rope", "prefix", tenant="secret-name")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    database = Database(tmp_path / "index.sqlite", LEDGER_SCHEMA, read_only=False)
    departures = Departures(database, limit=100)
    keys = [f"{number:064x}" for number in range(500)]
    for key in keys:
        departures.add([key], "evicted")
    known = departures.of(keys)
    assert 100 <= len(known) <= 111
    assert set(keys[-100:]) <= set(known)
    departures.add(keys[:1], "damaged")
    departures.add(keys[:1], "deleted")
    assert departures.of(keys[:1]) == {keys[0]: "deleted"}
    departures.forget(keys[0])
    assert departures.of(keys[:1]) == {}
    database.close()


def test_namespaces_are_told_by_tenant(tmp_path: Path) -> None:
    other = replace(IDENTITY, dtype="bfloat16")
    with KVStore(tmp_path) as store:
        store.namespaces.add(IDENTITY)
        store.namespaces.add(other)
        store.namespaces.add(replace(IDENTITY, tenant="somebody"))
        assert {one.digest for one in store.namespaces.of_tenant("secret-name")} == {IDENTITY.digest, other.digest}
        assert store.namespaces.of_tenant("guess") == []
        assert len(store.namespaces.of_others("secret-name")) == 1
    stored = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert b"secret-name" not in stored
    assert b"somebody" not in stored
    with KVStore(tmp_path, read_only=True) as store:
        store.namespaces.add(replace(IDENTITY, dtype="float16"))
        assert len(store.namespaces.of_tenant("secret-name")) == 2


def test_a_damaged_record_says_nothing(tmp_path: Path) -> None:
    with KVStore(tmp_path) as store:
        store.namespaces.add(IDENTITY)
        records = store._parts.index.records
        (name,) = records.names("namespace:")
        records.remove(name)
        records.add(name, b"{not json")
        assert store.namespaces.of_tenant("secret-name") == []
