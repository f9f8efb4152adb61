"""Links that take a folder's place while the store is open: nothing outside the store is deleted, moved or written."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fused_kv_llm.errors import FusedKVWarning, StoreUnavailableError
from fused_kv_llm.store import KVStore

NAME = "anchors-0.1"
FOLDERS = ["chunks", "chunks/ab", "tmp", "quarantine"]

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


def contents(folder: Path) -> dict[str, tuple[float, bytes | None]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def damage(store: KVStore, chunk) -> None:
    path = chunk.path(store.kv_dir)
    path.write_bytes(path.read_bytes()[:100])


def find_damage(store: KVStore, chunk) -> None:
    with pytest.warns(FusedKVWarning, match=r"cannot be used|cannot be read now"):
        assert chunk.open(store) is None


def discard(store: KVStore, chunk) -> None:
    with pytest.warns(FusedKVWarning, match="a test"):
        assert store.discard(chunk.key, "a test")


def put_by_another_thread(store: KVStore, chunk) -> None:
    failed: list[Exception] = []

    def run() -> None:
        try:
            chunk.put(store)
        except StoreUnavailableError as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


CHANGES: dict[str, Callable] = {
    "put": lambda store, old, new: new.put(store),
    "put a sidecar": lambda store, old, new: store.sidecars.put(old.key, NAME, {"x": torch.zeros(3)}),
    "delete": lambda store, old, new: store.delete([old.key]),
    "evict": lambda store, old, new: store.evict(0),
    "find damage": lambda store, old, new: find_damage(store, old),
    "discard": lambda store, old, new: discard(store, old),
    "mend": lambda store, old, new: store.check(fix=True),
    "collect garbage": lambda store, old, new: store.collect_garbage(),
    "sweep": lambda store, old, new: store._parts.folder.staging.sweep(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FOLDERS)
def test_nothing_outside_is_changed(store: KVStore, kv_dir: Path, tmp_path: Path, make_chunk, name: str, change: str):
    old = make_chunk(1)
    new = next(chunk for chunk in map(make_chunk, range(2, 9999)) if chunk.key[:2] == old.key[:2])
    old.put(store)
    store.sidecars.put(old.key, NAME, {"x": torch.zeros(4)})
    if change == "find damage":
        damage(store, old)
    folder = kv_dir / name.replace("ab", old.key[:2])
    # Somebody else's files, under the very names that the store deletes and moves.
    victim = tmp_path / "victim"
    folder.rename(victim)
    for file in ("thesis.txt", f"{old.key}.elsewhere.1.ab"):
        (victim / file).write_text("x")
        os.utime(victim / file, (0, 0))
    folder.symlink_to(victim)
    before = contents(victim)
    said = ""
    try:
        CHANGES[change](store, old, new)
    except StoreUnavailableError as error:
        said = str(error)
    assert not said or ("symbolic link" in said and str(folder) in said)
    assert contents(victim) == before
    # What the error says to do works.
    if folder.is_symlink():
        folder.unlink()
    if not folder.exists():
        shutil.copytree(victim, folder)
        (folder / "thesis.txt").unlink()
    store.check(fix=True)
    assert store.check().findings == []
    new.put(store)
    assert new.open(store).read_layers(0, 3)[0].equal(new.kv.keys)


def test_nothing_is_read_through_a_link(kv_dir: Path, tmp_path: Path, make_chunk) -> None:
    chunk = make_chunk()
    with KVStore(kv_dir, memory_bytes=0) as store:
        chunk.put(store)
        store.sidecars.put(chunk.key, NAME, {"x": torch.zeros(4)})
        folder = chunk.path(kv_dir).parent
        folder.rename(tmp_path / "victim")
        folder.symlink_to(tmp_path / "victim")
        with pytest.warns(FusedKVWarning, match="cannot be read now"):
            assert chunk.open(store) is None
        assert not store.sidecars.has(chunk.key, NAME)
        with pytest.warns(FusedKVWarning, match="cannot be read now"):
            assert store.sidecars.read(chunk.key, NAME) is None
        report = store.archive.export(tmp_path / "kv.tar")
        assert (report.chunks, report.missed) == (0, [chunk.key])
        folder.unlink()
        (tmp_path / "victim").rename(folder)
        assert chunk.open(store) is not None
        assert store.sidecars.read(chunk.key, NAME) is not None


def test_no_other_index_is_written(store: KVStore, kv_dir: Path, tmp_path: Path, make_chunk) -> None:
    """A thread's first use of the store opens the index by its path."""
    victim = tmp_path / "victim.db"
    KVStore(tmp_path / "other").close()
    (tmp_path / "other" / "index.sqlite").rename(victim)
    (kv_dir / "index.sqlite").unlink()
    (kv_dir / "index.sqlite").symlink_to(victim)
    with pytest.raises(StoreUnavailableError, match="symbolic link"):
        put_by_another_thread(store, make_chunk())
    with sqlite3.connect(victim) as connection:
        assert connection.execute("SELECT count(*) FROM chunks").fetchone() == (0,)
    connection.close()
