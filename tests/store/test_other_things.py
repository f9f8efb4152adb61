"""Folders, pipes and sockets in place of a store's files: nothing breaks, and ``check --fix`` moves them away."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fused_kv_llm.errors import FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import KVStore

NAME = "anchors-0.1"
TENSORS = {"positions": torch.arange(3)}

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


def _folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.txt").write_text("x")


def _socket(path: Path) -> None:
    # Only the last part of the name: a socket's path may have 108 bytes.
    here = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.bind(f"/proc/self/fd/{here}/s")
        os.rename(path.parent / "s", path)
    finally:
        os.close(here)


THINGS: dict[str, Callable[[Path], None]] = {
    "folder": _folder,
    "pipe": os.mkfifo,
    "socket": _socket,
    "link": lambda path: path.symlink_to("/etc/passwd"),
    "link to nothing": lambda path: path.symlink_to("nothing"),
}


@pytest.fixture(name="place", params=[None, NAME], ids=["chunk", "side"])
def _place(request: pytest.FixtureRequest) -> str | None:
    return request.param


@pytest.fixture(name="chunk", params=THINGS)
def _chunk(request: pytest.FixtureRequest, store: KVStore, kv_dir: Path, make_chunk, place: str | None) -> Iterator:
    """Return a chunk whose file, or whose sidecar, is something else."""
    chunk, other = make_chunk(1), make_chunk(2)
    for one in (chunk, other):
        one.put(store)
        store.sidecars.put(one.key, NAME, TENSORS)
    path = path_of(kv_dir, chunk, place)
    path.unlink()
    THINGS[request.param](path)
    yield chunk
    # What belongs to nobody here was not deleted.
    kept = list(kv_dir.rglob("thesis.txt"))
    assert len(kept) == (request.param == "folder")
    # Whatever was done, the other chunk is whole.
    assert store.sidecars.read(other.key, NAME) is not None
    assert other.open(store).read_layers(0, 3)[0].equal(other.kv.keys)
    assert store.check(fix=True).by_kind == {}


def path_of(kv_dir: Path, chunk, place: str | None) -> Path:
    path = chunk.path(kv_dir)
    return path if place is None else path.with_suffix(f".{place}.safetensors")


def is_file(path: Path) -> bool:
    return stat.S_ISREG(path.lstat().st_mode)


def test_reading_is_a_miss_with_a_warning(store: KVStore, kv_dir: Path, chunk, place: str | None) -> None:
    path = path_of(kv_dir, chunk, place)
    if place is None:
        with pytest.warns(FusedKVWarning, match="not a regular file"):
            assert chunk.open(store) is None
    else:
        assert not store.sidecars.has(chunk.key, NAME)
        with pytest.warns(FusedKVWarning, match="not a regular file"):
            assert store.sidecars.read(chunk.key, NAME) is None
    assert not os.path.lexists(path)
    store.check(fix=True)


def test_the_audit_reports_it_once_and_moves_it_away(store: KVStore, kv_dir: Path, chunk, place: str | None) -> None:
    before = store.check()
    assert before.by_kind["damaged"] == 1
    assert "missing" not in before.by_kind
    (finding,) = (finding for finding in before.findings if finding.kind == "damaged")
    assert finding.path == str(path_of(kv_dir, chunk, place))
    assert "not a regular file" in finding.detail
    store.check(fix=True)
    assert not os.path.lexists(path_of(kv_dir, chunk, place))
    assert len(os.listdir(kv_dir / "quarantine")) == 1


def test_it_is_put_again(store: KVStore, kv_dir: Path, chunk, place: str | None) -> None:
    if place is None:
        assert chunk.put(store) > 0
        assert torch.equal(chunk.open(store).read_layers(0, 3)[0], chunk.kv.keys)
    else:
        assert store.sidecars.put(chunk.key, NAME, TENSORS) > 0
        assert torch.equal(store.sidecars.read(chunk.key, NAME)["positions"], torch.arange(3))
    assert is_file(path_of(kv_dir, chunk, place))


def test_it_makes_room(store: KVStore, kv_dir: Path, chunk, make_chunk, place: str | None) -> None:
    other = make_chunk(2)
    assert store.evict(0) == 2
    assert store.stats().tiers["disk"] == (0, 0)
    assert list((kv_dir / "chunks").rglob("*.safetensors")) == []
    other.put(store)
    store.sidecars.put(other.key, NAME, TENSORS)


def test_it_is_deleted(store: KVStore, kv_dir: Path, chunk, place: str | None) -> None:
    assert store.delete([chunk.key]) == 1
    assert not os.path.lexists(path_of(kv_dir, chunk, place))


def test_it_is_not_exported(store: KVStore, tmp_path: Path, chunk, place: str | None) -> None:
    report = store.archive.export(tmp_path / "kv.tar")
    assert (report.chunks, report.missed) == ((1, [chunk.key]) if place is None else (2, []))
    store.check(fix=True)


def test_it_is_not_copied_to_a_remote_tier(kv_dir: Path, store: KVStore, tmp_path: Path, chunk, make_chunk) -> None:
    remote = f"file://{tmp_path / 'remote'}"
    with KVStore(kv_dir, remote=remote) as again:  # noqa: SIM117
        with pytest.warns(FusedKVWarning, match="could not be copied"):
            assert again.evict(0) == 2
    assert make_chunk(2).key in {path.name[:64] for path in (tmp_path / "remote").iterdir()}
    with KVStore(kv_dir, remote=remote) as again:
        again.fetch([make_chunk(2).key])


def test_garbage_with_folders_in_it(store: KVStore, kv_dir: Path, make_chunk) -> None:
    chunk = make_chunk()
    chunk.put(store)
    chunk.path(kv_dir).unlink()
    _folder(chunk.path(kv_dir))
    store.check(fix=True)
    assert store.collect_garbage()[0] == 1
    assert os.listdir(kv_dir / "quarantine") == []


def test_names_as_long_as_names_may_be(store: KVStore, kv_dir: Path, make_chunk) -> None:
    chunk = make_chunk()
    chunk.put(store)
    (chunk.path(kv_dir).parent / ("ü" * 127)).write_text("x")
    assert store.check(fix=True).by_kind == {"foreign": 1}
    assert store.check().findings == []


@pytest.mark.parametrize("name", ["chunks", "chunks/ab", "tmp", "quarantine"])
def test_a_file_where_a_folder_should_be(store: KVStore, kv_dir: Path, make_chunk, name: str) -> None:
    chunk = make_chunk()
    folder = kv_dir / name.replace("ab", chunk.key[:2])
    if folder.exists():
        folder.rmdir()
    folder.write_text("x")
    if name == "chunks/ab":
        with pytest.raises(StoreUnavailableError, match="not a folder"):
            chunk.put(store)
        assert store.check(fix=True).by_kind == {"foreign": 1}
        assert chunk.put(store) > 0
    elif name == "quarantine":
        chunk.put(store)
        chunk.path(kv_dir).write_text("x")
        with pytest.warns(FusedKVWarning, match="not a folder"):
            assert chunk.open(store) is None
    else:
        with pytest.raises(StoreUnavailableError, match="not a folder"):
            chunk.put(store)
        with pytest.raises(StoreUnavailableError, match="not a folder"):
            store.check()
