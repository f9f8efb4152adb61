"""Links inside a store that lead out of it: nothing outside the store's folder is deleted, moved or written."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest

from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store import KVStore


@pytest.fixture(name="victim")
def _victim(tmp_path: Path) -> Path:
    """Return a folder of somebody else's, with an old file."""
    folder = tmp_path / "victim"
    (folder / "sub").mkdir(parents=True)
    for file in (folder / "thesis.txt", folder / "sub" / "y"):
        file.write_text("x")
        os.utime(file, (time.time() - 7200,) * 2)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("name", ["tmp", "quarantine", "chunks", "chunks/ab"])
def test_linked_folders_are_refused(kv_dir: Path, victim: Path, name: str, read_only: bool) -> None:
    KVStore(kv_dir).close()
    link = kv_dir / name
    if link.exists():
        link.rmdir()
    link.symlink_to(victim)
    before = contents(victim)
    with pytest.raises(StoreUnavailableError, match="symbolic link") as caught:
        KVStore(kv_dir, read_only=read_only)
    assert str(link) in str(caught.value)
    assert contents(victim) == before
    # What the error says to do works.
    link.unlink()
    if read_only:
        KVStore(kv_dir, read_only=True).close()
    KVStore(kv_dir).close()


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-wal", "index.sqlite-shm"])
@pytest.mark.parametrize("kind", ["empty", "database", "nothing"])
def test_linked_indexes_are_refused(kv_dir: Path, victim: Path, name: str, kind: str) -> None:
    target = victim / "data.db"
    if kind == "empty":
        target.touch()
    elif kind == "database":
        database = sqlite3.connect(target)
        database.execute("create table a (b)")
        database.close()
    kv_dir.mkdir()
    (kv_dir / name).symlink_to(target)
    before = contents(victim)
    for read_only in (False, True):
        with pytest.raises(StoreUnavailableError, match="symbolic link"):
            KVStore(kv_dir, read_only=read_only)
    assert contents(victim) == before
    assert os.listdir(kv_dir) == [name]


def test_nothing_is_put_into_a_linked_folder(store: KVStore, kv_dir: Path, victim: Path, make_chunk) -> None:
    chunk = make_chunk()
    (kv_dir / "chunks" / chunk.key[:2]).symlink_to(victim)
    before = contents(victim)
    with pytest.raises(StoreUnavailableError, match="symbolic link"):
        chunk.put(store)
    assert contents(victim) == before
    assert os.listdir(kv_dir / "tmp") == []
    assert store.stats().chunks == 0


def test_the_store_itself_may_be_a_link(kv_dir: Path, tmp_path: Path, make_chunk) -> None:
    elsewhere = tmp_path / "large_disk"
    elsewhere.mkdir()
    kv_dir.symlink_to(elsewhere)
    for read_only in (False, True):
        with KVStore(kv_dir, read_only=read_only) as store:
            if not read_only:
                make_chunk().put(store)
            assert make_chunk().open(store) is not None
