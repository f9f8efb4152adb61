"""Encryption at rest: nothing readable on the disk, nothing altered unnoticed, no other key."""

from __future__ import annotations

import base64

import pytest
import torch

from fused_kv_llm.errors import ChunkDamagedError, ConfigError, FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import KVStore, rebuild_index

pytest.importorskip("cryptography")
pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")

KEY, OTHER = "0123456789abcdef" * 4, "f" * 64


@pytest.fixture
def filled(kv_dir, make_chunk):
    chunks = [make_chunk(seed, layers=3) for seed in range(4)]
    with KVStore(kv_dir, encryption_key=KEY) as store:
        for chunk in chunks:
            chunk.put(store)
        store.sidecars.put(chunks[0].key, "anchors-0.1", {"secret-name": torch.arange(40.0)})
    return chunks


def test_round_trip_with_every_spelling_of_the_key(kv_dir, filled, monkeypatch):
    raw = bytes.fromhex(KEY)
    for key in (KEY, raw, base64.b64encode(raw).decode(), None):
        if key is None:
            monkeypatch.setenv("FUSED_KV_ENCRYPTION_KEY", KEY)
        with KVStore(kv_dir, encryption_key=key) as store:
            for chunk in filled:
                keys, values = chunk.open(store).read_layers(0, 3)
                assert keys.equal(chunk.kv.keys)
                assert values.equal(chunk.kv.values)
                assert store.rows([chunk.key])[chunk.key].text == chunk.text
            (rows,), keys_found = store.content_hashes(filled[0].identity), store.keys(filled[0].identity)
            by_key = {c.key: c.content for c in filled}
            assert [int(full) for full in rows.full] == [by_key[k].full for k in keys_found]
            assert store.sidecars.read(filled[0].key, "anchors-0.1")["secret-name"].equal(torch.arange(40.0))
            assert store.check().findings == []


def test_nothing_readable_on_the_disk(kv_dir, filled):
    everything = b"".join(path.read_bytes() for path in kv_dir.rglob("*") if path.is_file())
    chunk = filled[0]
    ids = torch.tensor(chunk.kv.token_ids, dtype=torch.int32).numpy().tobytes()
    secrets = [
        chunk.text.encode()[:12], ids, ids[:8], b"secret-name", bytes.fromhex(KEY), KEY.encode(),
        chunk.kv.keys.numpy().tobytes()[:16], torch.arange(40.0).numpy().tobytes()[40:60],
        chunk.content.full.to_bytes(8, "little"), chunk.content.full.to_bytes(8, "big"),
        str(chunk.content.full).encode(),
    ]  # fmt: skip
    for secret in secrets:
        assert secret not in everything


def test_other_keys_are_refused(kv_dir, filled, tmp_path):
    with pytest.raises(StoreUnavailableError, match="another key"):
        KVStore(kv_dir, encryption_key=OTHER)
    with pytest.raises(StoreUnavailableError, match="is encrypted: give its encryption_key"):
        KVStore(kv_dir)
    with pytest.raises(StoreUnavailableError, match="is encrypted"):
        KVStore(kv_dir, read_only=True)
    KVStore(tmp_path / "plain").close()
    with pytest.raises(StoreUnavailableError, match="is not encrypted"):
        KVStore(tmp_path / "plain", encryption_key=KEY)
    with KVStore(kv_dir, encryption_key=KEY) as store:
        assert filled[0].open(store) is not None


@pytest.mark.parametrize("key", ["short", "z" * 64, b"16 bytes are few", 5])
def test_keys_that_are_none(kv_dir, key):
    with pytest.raises(ConfigError, match="32 bytes") as caught:
        KVStore(kv_dir, encryption_key=key)
    # Somebody's mistyped key is a secret too.
    assert str(key) not in str(caught.value)


def test_files_of_other_stores_are_not_believed(kv_dir, filled, tmp_path):
    """A plain file in an encrypted store would be a way around the key; so would one of another key."""
    for name, key in (("plain", None), ("other", OTHER)):
        with KVStore(tmp_path / name, encryption_key=key) as store:
            filled[1].put(store)
        filled[1].path(kv_dir).write_bytes(filled[1].path(tmp_path / name).read_bytes())
        with KVStore(kv_dir, encryption_key=KEY) as store:
            with pytest.warns(FusedKVWarning, match="encrypted"):
                assert filled[1].open(store) is None
            filled[1].put(store)


def test_messages_cannot_change_places(kv_dir, filled):
    """Every piece is bound to its place in its file: layers exchanged are noticed, though each is genuine."""
    path = filled[2].path(kv_dir)
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    size = (len(raw) - start) // 6
    path.write_bytes(raw[:start] + raw[start + size : start + 2 * size] + raw[start : start + size]
                     + raw[start + 2 * size :])  # fmt: skip
    with KVStore(kv_dir, encryption_key=KEY) as store, filled[2].open(store) as stored:
        with pytest.raises(ChunkDamagedError, match="layer 0"):
            stored.read_layers(0, 1)
        assert stored.read_layers(2, 3)[0].equal(filled[2].kv.keys[2:])


def test_index_is_rebuilt_with_the_key(kv_dir, filled):
    rebuild_index(kv_dir)
    with KVStore(kv_dir, encryption_key=KEY) as store:
        assert store.check(fix=True).by_kind == {"orphaned": 4, "wrong row": 1}
        assert filled[3].open(store) is not None
        assert store.rows([filled[3].key])[filled[3].key].text == filled[3].text


@pytest.mark.parametrize(
    ("written", "given", "said"),
    [(KEY, None, "are encrypted"), (KEY, OTHER, "another key"), (None, KEY, "are not encrypted")],
)
@pytest.mark.parametrize("index", ["gone", "empty", "there"])
def test_a_wrong_key_neither_mends_nor_makes_an_index(kv_dir, make_chunk, tmp_path, written, given, said, index):
    """Where the index is lost, or is of the wrong key already, the files alone say which key is right."""
    chunk = make_chunk()
    with KVStore(kv_dir, encryption_key=written) as store:
        chunk.put(store)
        store.sidecars.put(chunk.key, "anchors-0.1", {"x": torch.zeros(3)})
    rebuild_index(kv_dir)
    if index == "empty":
        (kv_dir / "index.sqlite").touch()
    elif index == "there":
        KVStore(tmp_path / "new", encryption_key=given).close()
        (tmp_path / "new" / "index.sqlite").rename(kv_dir / "index.sqlite")
    before = {path: path.stat().st_size for path in kv_dir.rglob("*")}
    with pytest.raises(StoreUnavailableError, match=rf"{said}.*Nothing was changed.*FUSED_KV_ENCRYPTION_KEY"):  # noqa: SIM117
        with KVStore(kv_dir, encryption_key=given) as store:
            store.check(fix=True)
    if index == "there":
        rebuild_index(kv_dir)
    else:
        assert {path: path.stat().st_size for path in kv_dir.rglob("*")} == before
    with KVStore(kv_dir, encryption_key=written) as store:
        assert store.check(fix=True).by_kind == {"orphaned": 1, "wrong row": 1}
        assert chunk.open(store) is not None


def test_one_file_of_another_key_does_not_stop_the_mending(kv_dir, filled):
    rebuild_index(kv_dir)
    path = filled[1].path(kv_dir)
    with KVStore(kv_dir.with_name("other"), encryption_key=OTHER) as store:
        filled[1].put(store)
    path.write_bytes(filled[1].path(kv_dir.with_name("other")).read_bytes())
    with KVStore(kv_dir, encryption_key=KEY) as store:
        assert store.check(fix=True).by_kind == {"orphaned": 3, "other key": 1, "wrong row": 1}
        assert store.check(fix=True, take_other_keys=True).by_kind == {"other key": 1}
        assert store.check().findings == []
