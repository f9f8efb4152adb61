"""The audit finds everything that can be wrong with a store, and mends it without losing a whole chunk."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3

import pytest
import torch

from fused_kv_llm.errors import FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import Finding, KVStore, rebuild_index
from fused_kv_llm.store.format import codec

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


@pytest.fixture
def chunks(store, make_chunk):
    made = [make_chunk(seed) for seed in range(12)]
    for chunk in made:
        chunk.put(store)
    return made


def flip(path, offset=-3):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)


def sql(kv_dir, statement, *values):
    with sqlite3.connect(kv_dir / "index.sqlite") as connection:
        connection.execute(statement, values)
    connection.close()


def other_version(store, chunk, monkeypatch):
    store.delete([chunk.key])
    with monkeypatch.context() as patch:
        patch.setattr(codec, "FORMAT_VERSION", 99)
        chunk.put(store)


def assert_readable(store, chunks):
    for chunk in chunks:
        with chunk.open(store) as stored:
            keys, values = stored.read_layers(0, 3)
        assert torch.equal(keys, chunk.kv.keys)
        assert torch.equal(values, chunk.kv.values)


def test_a_sound_store_has_no_findings(store, chunks):
    store.sidecars.put(chunks[0].key, "anchors-0.1", {"positions": torch.arange(3)})
    seen = []
    report = store.check(progress=lambda done, total: seen.append((done, total)))
    assert report.findings == []
    assert report.chunks == 12
    assert report.nbytes == store.stats().bytes_on_disk
    assert seen[-1] == (13, 13)


def test_everything_that_can_be_wrong_at_once(store, kv_dir, chunks, monkeypatch):
    missing, orphan, short, flipped, headless, foreign, old, wrong_row, wrong_hash, wrong_place, *sound = chunks
    missing.path(kv_dir).unlink()
    sql(kv_dir, "DELETE FROM chunks WHERE key = ?", orphan.key)
    sql(kv_dir, "DELETE FROM places WHERE key = ?", orphan.key)
    os.truncate(short.path(kv_dir), 700)
    flip(flipped.path(kv_dir))
    flip(headless.path(kv_dir), 20)
    foreign.path(kv_dir).write_bytes(b"something else entirely")
    other_version(store, old, monkeypatch)
    sql(kv_dir, "UPDATE chunks SET text = ? WHERE key = ?", b"another text", wrong_row.key)
    sql(kv_dir, "UPDATE chunks SET full_hash = 5 WHERE key = ?", wrong_hash.key)
    sql(kv_dir, "DELETE FROM places WHERE key = ?", wrong_place.key)
    (kv_dir / "chunks" / "notes.txt").write_text("not ours")
    (kv_dir / "chunks" / sound[0].key[:2] / "x.safetensors").write_text("not ours")
    temp = kv_dir / "tmp" / f"{sound[0].key}.elsewhere.1.ab"
    temp.write_bytes(b"half")
    os.utime(temp, (0, 0))

    expected = {"missing": 1, "orphaned": 1, "damaged": 5, "wrong row": 3, "foreign": 2, "temporary": 1}
    before = store.check()
    assert before.by_kind == expected
    assert not before.fixed
    # Looking changes nothing.
    assert store.check().findings == before.findings
    assert store.check(fix=True).by_kind == expected
    after = store.check()
    assert after.findings == []
    assert after.chunks == 6
    assert_readable(store, [orphan, wrong_row, wrong_hash, wrong_place, *sound])
    assert store.rows([wrong_row.key])[wrong_row.key].text == wrong_row.text
    assert store.contains([c.key for c in (missing, short, flipped, headless, foreign, old)]) == set()
    assert not temp.exists()
    # What was damaged can be stored again.
    for chunk in (missing, short, flipped, headless, foreign, old):
        assert chunk.put(store) > 0
    assert store.check().chunks == 12


def test_index_rebuilt_from_the_files_alone(kv_dir, make_chunk):
    chunks = [make_chunk(seed) for seed in range(8)]
    with KVStore(kv_dir) as store:
        for chunk in chunks:
            chunk.put(store)
        store.sidecars.put(chunks[0].key, "anchors-0.1", {"positions": torch.arange(3)})
        rows, stats = store.rows(c.key for c in chunks), store.stats()
        hashes = {c.key: store._parts.index.hashes(c.key) for c in chunks}
    rebuild_index(kv_dir)
    with KVStore(kv_dir) as store:
        assert store.stats().chunks == 0
        assert store.check(fix=True).by_kind == {"orphaned": 8, "wrong row": 1}
        assert store.rows(c.key for c in chunks) == rows
        assert {c.key: store._parts.index.hashes(c.key) for c in chunks} == hashes
        after = store.stats()
        assert (after.chunks, after.tokens, after.tiers) == (stats.chunks, stats.tokens, stats.tiers)
        assert_readable(store, chunks)
        assert torch.equal(store.sidecars.read(chunks[0].key, "anchors-0.1")["positions"], torch.arange(3))


def test_side_files(store, kv_dir, chunks):
    for chunk in chunks[:4]:
        store.sidecars.put(chunk.key, "anchors-0.1", {"positions": torch.arange(3)})
    paths = [chunk.path(kv_dir).with_suffix(".anchors-0.1.safetensors") for chunk in chunks[:4]]
    flip(paths[0])
    paths[1].unlink()
    shutil.copy(paths[3], paths[2])
    lonely = chunks[5].path(kv_dir).with_suffix(".anchors-0.1.safetensors")
    shutil.copy(paths[3], lonely)
    assert store.check(fix=True).by_kind == {"damaged": 3, "missing": 1}
    assert store.check().findings == []
    assert [store.sidecars.read(c.key, "anchors-0.1") is not None for c in chunks[:4]] == [False, False, False, True]
    assert_readable(store, chunks)


@pytest.mark.parametrize("gone", ["vanished", "damaged", "without a row", "on the remote tier"])
def test_side_files_without_their_chunk_are_mended_in_one_run(kv_dir, tmp_path, make_chunk, gone):
    chunk, other = make_chunk(1), make_chunk(2)
    remote = f"file://{tmp_path / 'remote'}"
    with KVStore(kv_dir, remote=remote if gone == "on the remote tier" else None) as store:
        for one in (chunk, other):
            one.put(store)
            for name in ("anchors-0.1", "shift"):
                store.sidecars.put(one.key, name, {"positions": torch.arange(3)})
        if gone == "on the remote tier":
            store.evict(0)
            store.fetch([chunk.key, other.key])
        if gone == "damaged":
            flip(chunk.path(kv_dir))
        else:
            chunk.path(kv_dir).unlink()
        if gone == "without a row":
            sql(kv_dir, "DELETE FROM chunks WHERE key = ?", chunk.key)
            sql(kv_dir, "DELETE FROM places WHERE key = ?", chunk.key)
        before = store.check()
        assert before.by_kind["orphaned"] == 2
        assert store.check(fix=True).findings == before.findings
        assert store.check().findings == []
        assert {path.name[:64] for path in (kv_dir / "chunks").rglob("*.safetensors")} == {other.key}
        total = sum(path.stat().st_size for path in (kv_dir / "chunks").rglob("*.safetensors"))
        assert store.stats().tiers["disk"] == (1, total)
        if gone == "on the remote tier":
            # What the remote tier still has is not lost.
            assert_readable(store, [chunk])
            assert store.sidecars.read(chunk.key, "shift") is not None
            assert store.check().findings == []


def test_a_row_written_again_keeps_its_side_files(store, kv_dir, chunks):
    store.sidecars.put(chunks[0].key, "anchors-0.1", {"positions": torch.arange(3)})
    sql(kv_dir, "UPDATE chunks SET text = ? WHERE key = ?", b"another text", chunks[0].key)
    before, stats = store.check(), store.stats()
    assert before.by_kind == {"wrong row": 1}
    assert store.check(fix=True).findings == before.findings
    assert store.check().findings == []
    assert store.stats().tiers == stats.tiers


@pytest.mark.parametrize("name", [None, "anchors-0.1"])
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EACCES])
def test_what_cannot_be_opened_now_is_left_where_it_is(store, kv_dir, chunks, monkeypatch, name, code):
    """Too many open files, or another user's: neither says anything about the file."""
    key = chunks[0].key
    store.sidecars.put(key, "anchors-0.1", {"positions": torch.arange(3)})
    before = sorted(kv_dir.rglob("*.safetensors"))
    open_chunk = store._parts.folder.open_chunk

    def refuse(asked, side=None):
        if (asked, side) == (key, name):
            raise OSError(code, os.strerror(code))
        return open_chunk(asked, side)

    with monkeypatch.context() as patch:
        patch.setattr(store._parts.folder, "open_chunk", refuse)
        report = store.check(fix=True)
    assert report.by_kind == {"unreadable": 1}
    assert (report.findings[0].left, report.left) == (True, 1)
    assert sorted(kv_dir.rglob("*.safetensors")) == before
    assert store.check().findings == []
    assert_readable(store, chunks)


def test_a_read_only_store_is_checked_but_not_mended(kv_dir, make_chunk):
    with KVStore(kv_dir) as store:
        make_chunk().put(store)
    flip(make_chunk().path(kv_dir))
    with KVStore(kv_dir, read_only=True) as store:
        (finding,) = store.check().findings
        assert isinstance(finding, Finding)
        assert finding.kind == "damaged"
        with pytest.raises(StoreUnavailableError, match="read_only"):
            store.check(fix=True)
    assert make_chunk().path(kv_dir).exists()


def test_deleted_chunk_is_not_served_from_another_stores_memory(kv_dir, make_chunk):
    chunk = make_chunk()
    with KVStore(kv_dir) as one, KVStore(kv_dir) as other:
        chunk.put(one)
        chunk.open(one).read_layers(0, 3)
        assert chunk.open(one).tier == "memory"
        other.delete([chunk.key])
        assert chunk.open(one) is None
        assert one.stats().memory_chunks == 0


def test_free_bytes_of_a_disk_that_is_gone(store, monkeypatch):
    def gone(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", gone)
    with pytest.raises(StoreUnavailableError, match="free space"):
        store.free_bytes()


def test_garbage(store, kv_dir, chunks):
    flip(chunks[0].path(kv_dir), 20)
    with pytest.warns(FusedKVWarning):
        chunks[0].open(store)
    (kv_dir / "tmp" / "old").write_bytes(b"12345")
    os.utime(kv_dir / "tmp" / "old", (0, 0))
    files, nbytes = store.collect_garbage()
    assert files == 2
    assert nbytes > 500
    assert list((kv_dir / "quarantine").iterdir()) == list((kv_dir / "tmp").iterdir()) == []
    assert_readable(store, chunks[1:])
