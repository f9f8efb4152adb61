"""Sidecars read some rows at a time: the tensors that were stored, verified, and nothing of damaged rows."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from fused_kv_llm.errors import ChunkDamagedError, ConfigError, FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.folder.layout import StoreFolder

NAME, KEY = "rows", "0123456789abcdef" * 4


def tensors(rows: int = 6) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randint(-127, 128, (rows, 2, 9, 4), generator=generator, dtype=torch.int8)
    return {"whole": whole, "scale": torch.rand(rows, 2, 9, 1, generator=generator)}


@pytest.mark.parametrize("secret", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_rows_are_those_that_were_stored(kv_dir: Path, make_chunk, secret: str | None, memory_bytes: int) -> None:
    if secret:
        pytest.importorskip("cryptography")
    chunk, want = make_chunk(), tensors()
    with KVStore(kv_dir, memory_bytes=memory_bytes, encryption_key=secret) as store:
        chunk.put(store)
        store.sidecars.put(chunk.key, NAME, want, by_rows=True)
        for turn in range(3):
            reader = store.sidecars.open(chunk.key, NAME)
            assert reader is not None
            # What is read once stays on the disk; what is read again is kept, if there is a budget.
            assert reader.in_memory == (turn > 1 and memory_bytes > 0)
            for start, stop in [(0, 2), (5, 6), (3, 3), (2, 6)]:
                got = reader.read(start, stop)
                assert got.keys() == want.keys()
                assert all(torch.equal(got[name], want[name][start:stop]) for name in want)
            reader.close()
            reader.close()


def test_rows_that_were_read_once_leave_no_memory_behind(kv_dir: Path, make_chunk) -> None:
    """What requests read of a sidecar fits no other file, so keeping it would only add to the memory tier's budget."""
    chunk = make_chunk()
    with KVStore(kv_dir) as store:
        chunk.put(store)
        store.sidecars.put(chunk.key, NAME, {"large": torch.zeros(4, 1 << 20, dtype=torch.int8)}, by_rows=True)
        reader = store.sidecars.open(chunk.key, NAME)
        assert reader is not None
        for row in range(4):
            reader.read(row, row + 1)
        reader.close()
        assert store._parts.reader._buffers.kept_nbytes() == 0


def test_a_file_checked_as_a_whole_is_read_whole(store: KVStore, make_chunk) -> None:
    chunk, want = make_chunk(), tensors()
    chunk.put(store)
    store.sidecars.put(chunk.key, NAME, want)
    reader = store.sidecars.open(chunk.key, NAME)
    assert reader is not None
    assert reader.in_memory
    assert torch.equal(reader.read(1, 3)["whole"], want["whole"][1:3])


def test_a_file_with_a_scalar_is_read_whole(kv_dir: Path, make_chunk) -> None:
    chunk = make_chunk()
    with KVStore(kv_dir, memory_bytes=0) as store:
        chunk.put(store)
        store.sidecars.put(chunk.key, NAME, {"scalar": torch.tensor(3.0)})
        reader = store.sidecars.open(chunk.key, NAME)
        assert reader is not None
        assert reader.in_memory


@pytest.mark.parametrize("secret", [None, KEY], ids=["plain", "encrypted"])
@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("rows", [(0, 7), (6, 7), (7, 8), (-1, 2), (4, 3), (0, 1 << 62)])
def test_rows_that_are_not_there(
    kv_dir: Path, make_chunk, secret: str | None, in_memory: bool, rows: tuple[int, int]
) -> None:
    """Somebody's mistake in counting is no damage: the file stays, and goes on being read."""
    if secret:
        pytest.importorskip("cryptography")
    chunk, want = make_chunk(), tensors()
    with KVStore(kv_dir, memory_bytes=1 << 20, encryption_key=secret) as store:
        chunk.put(store)
        store.sidecars.put(chunk.key, NAME, want, by_rows=True)
        if in_memory:
            store.sidecars.read(chunk.key, NAME)
        reader = store.sidecars.open(chunk.key, NAME)
        assert (reader.in_memory, reader.rows) == (in_memory, 6)
        for call in (reader.read, reader.announce):
            with pytest.raises(ConfigError, match=rf"Rows {rows[0]} to {rows[1] - 1} .* has rows 0 to 5"):
                call(*rows)
        assert torch.equal(reader.read(0, 6)["whole"], want["whole"])
        reader.close()
        assert store.counters().damaged == 0
        assert store.check().findings == []


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_rows_of_a_scalar(kv_dir: Path, make_chunk, memory_bytes: int) -> None:
    chunk = make_chunk()
    with KVStore(kv_dir, memory_bytes=memory_bytes) as store:
        chunk.put(store)
        store.sidecars.put(chunk.key, NAME, {"scalar": torch.tensor(3.0), "x": torch.zeros(3)})
        for _ in range(3):
            reader = store.sidecars.open(chunk.key, NAME)
            assert reader.rows is None
            with pytest.raises(ConfigError, match=r"'scalar' .* is a scalar and has no rows.*sidecars\.read"):
                reader.read(0, 1)
        assert store.sidecars.read(chunk.key, NAME)["scalar"] == 3.0
        assert store.check().findings == []


def test_rows_of_tensors_of_different_lengths(store: KVStore, make_chunk) -> None:
    chunk = make_chunk()
    chunk.put(store)
    store.sidecars.put(chunk.key, NAME, {"a": torch.arange(2), "b": torch.arange(5)})
    reader = store.sidecars.open(chunk.key, NAME)
    assert reader.rows is None
    assert torch.equal(reader.read(1, 2)["b"], torch.tensor([1]))
    with pytest.raises(ConfigError, match=r"'a' .* has rows 0 to 1"):
        reader.read(0, 3)


def test_damaged_rows_raise_and_the_others_are_good(kv_dir: Path, store: KVStore, make_chunk) -> None:
    chunk, want = make_chunk(), tensors()
    chunk.put(store)
    store.sidecars.put(chunk.key, NAME, want, by_rows=True)
    (path,) = (path for path in kv_dir.rglob("*") if NAME in path.name)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    reader = store.sidecars.open(chunk.key, NAME)
    assert reader is not None
    assert torch.equal(reader.read(0, 5)["scale"], want["scale"][:5])
    with pytest.raises(ChunkDamagedError, match="checksum of 'scale'") as caught:
        reader.read(4, 6)
    assert caught.value.key == chunk.key
    reader.close()


def test_a_damaged_header_is_a_missing_file(kv_dir: Path, store: KVStore, make_chunk) -> None:
    chunk = make_chunk()
    chunk.put(store)
    store.sidecars.put(chunk.key, NAME, tensors(), by_rows=True)
    (path,) = (path for path in kv_dir.rglob("*") if NAME in path.name)
    raw = bytearray(path.read_bytes())
    raw[60] ^= 1
    path.write_bytes(raw)
    with pytest.warns(FusedKVWarning, match=NAME):
        assert store.sidecars.open(chunk.key, NAME) is None
    assert not path.exists()
    assert store.sidecars.open(chunk.key, NAME) is None


def test_tensors_with_different_rows_are_refused(store: KVStore, make_chunk) -> None:
    chunk = make_chunk()
    chunk.put(store)
    with pytest.raises(ConfigError, match="different numbers of rows"):
        store.sidecars.put(chunk.key, NAME, {"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}, by_rows=True)
    with pytest.raises(ConfigError, match="different numbers of rows"):
        store.sidecars.put(chunk.key, NAME, {"a": torch.tensor(1.0)}, by_rows=True)


def test_what_cannot_be_opened_now_stays(store: KVStore, make_chunk, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk, want = make_chunk(), tensors()
    chunk.put(store)
    store.sidecars.put(chunk.key, NAME, want, by_rows=True)

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(StoreFolder, "open_chunk", refuse)
        with pytest.warns(FusedKVWarning, match="cannot be read now"):
            assert store.sidecars.open(chunk.key, NAME) is None
    reader = store.sidecars.open(chunk.key, NAME)
    assert reader is not None
    assert torch.equal(reader.read(0, 6)["whole"], want["whole"])


def test_a_damaged_file_that_cannot_be_moved_is_a_missing_one(
    kv_dir: Path, store: KVStore, make_chunk, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = make_chunk()
    chunk.put(store)
    store.sidecars.put(chunk.key, NAME, tensors(), by_rows=True)
    (path,) = (path for path in kv_dir.rglob("*") if NAME in path.name)
    path.write_bytes(path.read_bytes()[:100])

    def refuse(*_: object) -> None:
        raise StoreUnavailableError("the quarantine refuses")

    monkeypatch.setattr(StoreFolder, "quarantine", refuse)
    for _ in range(2):
        with pytest.warns(FusedKVWarning, match="could not be moved away"):
            assert store.sidecars.open(chunk.key, NAME) is None


def test_a_sidecar_in_memory_is_served_while_its_file_is_the_same(kv_dir: Path, store: KVStore, make_chunk) -> None:
    chunk, old, new = make_chunk(), tensors(), {"whole": torch.zeros(6, 2)}
    chunk.put(store)
    store.sidecars.put(chunk.key, NAME, old, by_rows=True)
    assert store.sidecars.read(chunk.key, NAME) is store.sidecars.read(chunk.key, NAME)
    with KVStore(kv_dir) as other:
        other.sidecars.put(chunk.key, NAME, new, by_rows=True)
    found = store.sidecars.read(chunk.key, NAME)
    assert found is not None
    assert torch.equal(found["whole"], new["whole"])
    assert store.stats().memory_bytes == new["whole"].nbytes
    store.delete([chunk.key])
    assert store.sidecars.read(chunk.key, NAME) is None
    assert store.stats().memory_bytes == 0


def test_a_sidecar_leaves_the_memory_with_its_damaged_chunk(store: KVStore, make_chunk) -> None:
    chunk = make_chunk()
    chunk.put(store)
    store.sidecars.put(chunk.key, NAME, tensors())
    store.sidecars.read(chunk.key, NAME)
    assert store.stats().memory_bytes > 0
    with pytest.warns(FusedKVWarning, match="a test says so"):
        assert store.discard(chunk.key, "a test says so")
    assert store.stats().memory_bytes == 0


def test_chunks_and_sidecars_share_one_budget(kv_dir: Path, make_chunk) -> None:
    chunks, rows = [make_chunk(seed) for seed in range(3)], {"x": torch.zeros(6, 100)}
    budget = 2 * chunks[0].kv.nbytes + rows["x"].nbytes
    with KVStore(kv_dir, memory_bytes=budget) as store:
        for chunk in chunks:
            chunk.put(store)
            store.sidecars.put(chunk.key, NAME, rows)
        for chunk in (*chunks, *chunks):
            chunk.open(store).read_layers(0, 3)
            assert store.sidecars.read(chunk.key, NAME) is not None
            assert 0 < store.stats().memory_bytes <= budget
        assert store.counters().evicted_memory > 0
