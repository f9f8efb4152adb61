"""An index from elsewhere can make the store miss, but not read or write where it should not."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store import KVStore

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


def tamper(kv_dir, *statements):
    connection = sqlite3.connect(kv_dir / "index.sqlite", isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()


def test_keys_that_are_paths_are_never_given_out(kv_dir, make_chunk):
    chunk, other = make_chunk(1), make_chunk(2)
    with KVStore(kv_dir) as store:
        chunk.put(store)
        other.put(store)
    tamper(
        kv_dir,
        "PRAGMA ignore_check_constraints = ON",
        f"UPDATE chunks SET key = '../../../../../../etc/{'x' * 43}' WHERE key = '{other.key}'",
    )
    with KVStore(kv_dir) as store:
        assert store.keys(chunk.identity) == [chunk.key]
        (rows,) = store.content_hashes(chunk.identity)
        assert len(rows.rowid) == 1


def test_the_index_itself_refuses_such_keys(kv_dir, make_chunk):
    chunk = make_chunk()
    with KVStore(kv_dir) as store:
        chunk.put(store)
    with pytest.raises(sqlite3.IntegrityError):
        tamper(kv_dir, "UPDATE chunks SET key = '../x'")


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER INSERT ON chunks BEGIN DELETE FROM chunks; END",
        "ALTER TABLE chunks ADD COLUMN more TEXT",
        "DROP INDEX chunks_content",
        "CREATE VIEW v AS SELECT 1",
    ],
)
def test_other_schemas_are_refused(kv_dir, statement):
    KVStore(kv_dir).close()
    tamper(kv_dir, statement)
    with pytest.raises(StoreUnavailableError, match=r"not an index of this release.*store check --fix"):
        KVStore(kv_dir)


def test_somebody_elses_database_is_left_alone(kv_dir):
    kv_dir.mkdir()
    tamper(kv_dir, "CREATE TABLE theirs (a)", "INSERT INTO theirs VALUES (1)")
    with pytest.raises(StoreUnavailableError, match="not an index"):
        KVStore(kv_dir)
    connection = sqlite3.connect(kv_dir / "index.sqlite")
    assert connection.execute("SELECT a FROM theirs").fetchall() == [(1,)]
    assert len(connection.execute("SELECT * FROM sqlite_master").fetchall()) == 1
    connection.close()


def test_altered_token_ids_in_the_index_do_not_hit(kv_dir, make_chunk):
    chunk = make_chunk()
    with KVStore(kv_dir) as store:
        chunk.put(store)
        tamper(kv_dir, "UPDATE chunks SET token_ids = x'0100000002000000030000000400000005000000'")
        row = store.rows([chunk.key])[chunk.key]
        assert row.token_ids == (1, 2, 3, 4, 5)
        with pytest.warns(match="token ids"):
            assert store.open(chunk.key, row.token_ids) is None


def test_connections_of_ended_threads_are_closed(store, make_chunk):
    make_chunk().put(store)
    for _ in range(20):
        thread = threading.Thread(target=store.stats)
        thread.start()
        thread.join()
    assert len(store._parts.index._database._connections) <= 2


def test_keys_up_to_one_are_found_without_going_through_the_others(store, kv_dir, make_chunk):
    chunks = [make_chunk(seed) for seed in range(6)]
    for chunk in chunks:
        chunk.put(store)
    keys = sorted(chunk.key for chunk in chunks)
    assert store.keys_up_to(chunks[0].identity, keys[3]) == keys[:4]
    assert store.keys_up_to(chunks[0].identity, "f" * 64) == keys
    assert store.keys_up_to("another", "f" * 64) == []
    connection = sqlite3.connect(kv_dir / "index.sqlite")
    statements = []
    with store._parts.index._database.connection() as traced:
        traced.set_trace_callback(statements.append)
    store.keys_up_to(chunks[0].identity, keys[3])
    with store._parts.index._database.connection() as traced:
        traced.set_trace_callback(None)
    (asked,) = [one for one in statements if "key <= " in one]
    plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {asked}"))
    connection.close()
    assert "(key<?)" in plan, "the index of keys narrows it down, not that of identities"
