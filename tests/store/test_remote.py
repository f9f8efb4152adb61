"""Remote tiers against real servers: a Redis process, an S3 process, a folder."""

from __future__ import annotations

import os

import pytest
import torch
from services import free_port, redis_server

from fused_kv_llm.errors import ConfigError, FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import KVStore, parts
from fused_kv_llm.store.remote.redis_tier import RemoteRedis
from fused_kv_llm.store.remote.tier import open_remote

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


@pytest.fixture
def chunks(make_chunk):
    return [make_chunk(seed) for seed in range(6)]


def fill(store, chunks):
    for chunk in chunks:
        chunk.put(store)
    store.sidecars.put(chunks[0].key, "anchors-0.1", {"positions": torch.arange(3)})


def assert_same(stored, chunk):
    keys, values = stored.read_layers(0, 3)
    assert keys.equal(chunk.kv.keys)
    assert values.equal(chunk.kv.values)


def test_five_calls(remote):
    tier = remote.open()
    large = os.urandom(3_000_000)
    assert tier.sizes() == {}
    tier.put("a", [memoryview(b"abc"), memoryview(b"defg")])
    tier.put("b", [memoryview(large)])
    assert tier.get(["a", "nothing", "b"]) == {"a": b"abcdefg", "b": large}
    assert tier.get(["a", "nothing", "b"], 5) == {"a": b"abcde", "b": large[:5]}
    assert tier.get([]) == {}
    assert tier.sizes() == {"a": 7, "b": len(large)}
    tier.put("a", [memoryview(b"new")])
    assert tier.get(["a"]) == {"a": b"new"}
    # Another client sees it all.
    assert remote.open().sizes() == {"a": 3, "b": len(large)}
    tier.delete(["a", "nothing"])
    assert tier.sizes() == {"b": len(large)}
    tier.delete(["b"])
    assert tier.sizes() == {}
    tier.close()


def test_evictions_demote_and_reads_promote(remote, kv_dir, chunks, monkeypatch):
    with remote.store(kv_dir, memory_bytes=0) as store:
        fill(store, chunks)
        assert store.evict(0) == 6
        tiers = store.stats().tiers
        assert (tiers["disk"], tiers["remote"][0]) == ((0, 0), 6)
        assert list((kv_dir / "chunks").rglob("*.safetensors")) == []
        assert store.contains(c.key for c in chunks) == {c.key for c in chunks}
        calls = []
        get = store._parts.promoter.remote.get
        monkeypatch.setattr(
            store._parts.promoter.remote, "get", lambda names, *rest: calls.append(names) or get(names, *rest)
        )
        # A batch is one call.
        assert store.fetch([c.key for c in chunks[:4]]) == {c.key for c in chunks[:4]}
        assert len(calls) == 1
        stored = chunks[4].open(store)
        assert stored.tier == "remote"
        assert_same(stored, chunks[4])
        for chunk in chunks[:5]:
            stored = chunk.open(store)
            assert stored.tier == "disk"
            assert_same(stored, chunk)
        assert torch.equal(store.sidecars.read(chunks[0].key, "anchors-0.1")["positions"], torch.arange(3))
        counters = store.counters()
        assert (counters.demoted, counters.promoted, counters.hits["remote"]) == (6, 5, 1)
        assert store.check().findings == []
        # What the remote tier has already is not copied again.
        assert store.evict(0) == 5
        assert store.counters().demoted == 6


def test_side_file_alone_is_fetched(remote, kv_dir, chunks):
    with remote.store(kv_dir) as store:
        fill(store, chunks)
        store.evict(0)
        assert store.sidecars.has(chunks[0].key, "anchors-0.1")
        assert torch.equal(store.sidecars.read(chunks[0].key, "anchors-0.1")["positions"], torch.arange(3))
        assert store.sidecars.read(chunks[1].key, "anchors-0.1") is None


def test_side_file_after_demotion_is_not_lost(remote, kv_dir, chunks):
    with remote.store(kv_dir) as store:
        fill(store, chunks)
        store.evict(0)
        # The chunk is brought back, gets one more sidecar, and is copied again with it.
        store.sidecars.put(chunks[2].key, "anchors-0.2", {"positions": torch.arange(9)})
        assert store.evict(0) == 1
        assert store.counters().demoted == 7
        assert torch.equal(store.sidecars.read(chunks[2].key, "anchors-0.2")["positions"], torch.arange(9))
        assert_same(chunks[2].open(store), chunks[2])
        assert store.check().findings == []


def test_another_machine_finds_the_chunks(remote, tmp_path, chunks):
    with remote.store(tmp_path / "one") as store:
        fill(store, chunks)
        store.evict(0)
    with remote.store(tmp_path / "two") as store:
        assert store.stats().chunks == 6
        assert store.rows([chunks[3].key])[chunks[3].key].text == chunks[3].text
        assert_same(chunks[3].open(store), chunks[3])
        assert store.delete([chunks[3].key]) == 1
    with remote.store(tmp_path / "three") as store:
        assert store.contains([c.key for c in chunks]) == {c.key for c in chunks if c is not chunks[3]}


def test_budget_overflows_into_the_remote_tier(remote, kv_dir, chunks):
    with KVStore(kv_dir.with_name("size")) as store:
        nbytes = chunks[0].put(store)
    with remote.store(kv_dir, disk_bytes=3 * nbytes + 100) as store:
        for chunk in chunks:
            chunk.put(store)
            assert store.stats().tiers["disk"][1] <= 3 * nbytes + 100
        for chunk in chunks * 2:
            assert_same(chunk.open(store), chunk)
        assert store.counters().misses == 0


@pytest.mark.parametrize("damage", ["flipped", "short", "foreign", "gone", "exchanged"])
def test_damage_on_the_remote_tier(remote, kv_dir, chunks, damage):
    with remote.store(kv_dir) as store:
        fill(store, chunks)
        store.evict(0)
        tier, name = store._parts.promoter.remote, f"{chunks[1].key}.safetensors"
        raw = bytearray(tier.get([name])[name])
        raw[-5] ^= 4
        bad = {
            "flipped": bytes(raw),
            "short": bytes(raw[:-40]),
            "foreign": b"\x80\x04\x95pickle",
            "exchanged": tier.get([f"{chunks[2].key}.safetensors"]).popitem()[1],
        }
        tier.delete([name])
        if damage != "gone":
            tier.put(name, [memoryview(bad[damage])])
        with pytest.warns(FusedKVWarning, match="cannot be used"):
            assert chunks[1].open(store) is None
        assert name not in tier.sizes()
        assert chunks[1].open(store) is None
        assert_same(chunks[2].open(store), chunks[2])
        assert chunks[1].put(store) > 0
        assert_same(chunks[1].open(store), chunks[1])


def test_foreign_objects_are_left_alone(remote, kv_dir, chunks):
    tier = remote.open()
    tier.put("readme.txt", [memoryview(b"hello")])
    tier.put(f"{'0' * 64}.safetensors", [memoryview(b"no chunk")])
    with pytest.warns(FusedKVWarning, match="cannot be used"):
        store = remote.store(kv_dir)
    with store:
        assert store.stats().chunks == 0
        fill(store, chunks)
    assert tier.get(["readme.txt"]) == {"readme.txt": b"hello"}


def test_an_encrypted_store_keeps_its_secrets_there_too(remote, tmp_path, chunks):
    pytest.importorskip("cryptography")
    key = "ab" * 32
    with remote.store(tmp_path / "one", encryption_key=key) as store:
        fill(store, chunks)
        store.evict(0)
    tier = remote.open()
    everything = b"".join(tier.get(list(tier.sizes())).values())
    assert everything
    assert b"Chunk 0 says" not in everything
    assert chunks[0].kv.keys.numpy().tobytes()[:16] not in everything
    with remote.store(tmp_path / "two", encryption_key=key) as store:
        assert_same(chunks[0].open(store), chunks[0])


def test_server_that_goes_away(kv_dir, chunks):
    with redis_server() as (url, process), KVStore(kv_dir, remote=url) as store:
        fill(store, chunks)
        store.evict(0)
        assert_same(chunks[0].open(store), chunks[0])
        process.kill()
        process.wait()
        with pytest.warns(FusedKVWarning, match="remote tier"):
            assert chunks[1].open(store) is None
        # What is on the disk is still there, and nothing is lost that the remote tier has.
        assert_same(chunks[0].open(store), chunks[0])
        assert store.stats().chunks == 6


def test_server_without_room(kv_dir, chunks):
    full = redis_server("--maxmemory", "1kb", "--maxmemory-policy", "noeviction")
    with full as (url, _), KVStore(kv_dir, remote=url) as store:
        chunks[0].put(store)
        with pytest.warns(FusedKVWarning, match="could not be copied"):
            assert store.evict(0) == 1
        assert store.stats().chunks == 0


class Counting:
    """A remote tier without anything in it, which counts how often it is closed."""

    url = identity = "redis://here"

    def __init__(self, error=None):
        self.closed, self.error = 0, error

    def versions(self):
        if self.error is not None:
            raise self.error
        return {}

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("read_only", [False, True])
def test_connections_are_closed_with_the_store(kv_dir, chunks, monkeypatch, read_only):
    with KVStore(kv_dir) as store:
        fill(store, chunks)
    tier = Counting()
    monkeypatch.setattr(parts, "open_remote", lambda url, options: tier)
    KVStore(kv_dir, remote="redis://here", read_only=read_only).close()
    assert tier.closed == 1


def test_connections_are_closed_when_the_store_does_not_open(kv_dir, monkeypatch):
    tier = Counting(StoreUnavailableError("no"))
    monkeypatch.setattr(parts, "open_remote", lambda url, options: tier)
    with pytest.raises(StoreUnavailableError, match="no"):
        KVStore(kv_dir, remote="redis://here")
    assert tier.closed == 1


def test_a_connection_that_cannot_be_closed_does_not_keep_the_index_open(kv_dir, monkeypatch):
    tier = Counting()
    monkeypatch.setattr(tier, "close", lambda: (_ for _ in ()).throw(OSError(104, "Connection reset by peer")))
    monkeypatch.setattr(parts, "open_remote", lambda url, options: tier)
    store = KVStore(kv_dir, remote="redis://here")
    with pytest.raises(OSError, match="reset"):
        store.close()
    assert not store._parts.index._database._connections


def test_addresses_that_cannot_work(kv_dir):
    for url in ("nowhere", "s4://x", 7):
        with pytest.raises(ConfigError, match="remote="):
            KVStore(kv_dir, remote=url)
    with pytest.raises(StoreUnavailableError, match="remote tier"):
        open_remote("file:///proc/none/of/this")


def test_passwords_stay_out_of_messages():
    pytest.importorskip("redis")
    with pytest.raises(StoreUnavailableError, match="server runs") as caught:
        RemoteRedis(f"redis://user:geheim@127.0.0.1:{free_port()}/0", {})
    assert "geheim" not in str(caught.value)
