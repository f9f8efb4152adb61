"""Folders that cannot be used, disks that are full, and what is left behind by writers that died."""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fused_kv_llm.errors import IndexDamagedError, StoreFullError, StoreUnavailableError
from fused_kv_llm.store import KVStore, rebuild_index
from fused_kv_llm.store.folder.layout import StoreFolder
from fused_kv_llm.store.index import database as database_module

pytestmark = pytest.mark.filterwarnings("error::fused_kv_llm.errors.FusedKVWarning")


def files_under(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and "index.sqlite" not in p.name}


def test_permissions(store, kv_dir, make_chunk):
    umask = os.umask(0)
    try:
        make_chunk().put(store)
    finally:
        os.umask(umask)
    for path in [kv_dir, *kv_dir.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert any(path.name == "index.sqlite-wal" for path in kv_dir.iterdir())


def test_user_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with KVStore("~/kv"):
        assert (tmp_path / "kv" / "index.sqlite").exists()


@pytest.mark.parametrize("place", ["file", "under_file", "proc"])
def test_folder_that_cannot_be_made(tmp_path, place):
    file = tmp_path / "file"
    file.write_text("hello")
    kv_dir = {"file": file, "under_file": file / "kv", "proc": Path("/proc/kv")}[place]
    with pytest.raises(StoreUnavailableError, match="Set kv_dir to a folder") as caught:
        KVStore(kv_dir)
    assert str(kv_dir) in str(caught.value)
    assert file.read_text() == "hello"


def test_folder_that_cannot_be_written(kv_dir, monkeypatch):
    KVStore(kv_dir).close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StoreUnavailableError, match="read_only=True"):
        KVStore(kv_dir)
    # That advice works: without a log the index is opened as it lies there.
    with KVStore(kv_dir, read_only=True) as store:
        assert store.stats().chunks == 0


def fail_after(calls: int, code: int, real):
    """Let a system call succeed some times and then fail."""
    done = 0

    def call(*args, **kwargs):
        nonlocal done
        done += 1
        if done > calls:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write 0", "write 1", "open 0", "fsync 0", "replace 0", "fsync 2"])
def test_full_disk(store, make_chunk, monkeypatch, call, code):
    name, calls = call.split()
    kv_dir, present, chunk = store.kv_dir, make_chunk(1), make_chunk(2)
    present.put(store)
    before, stats = files_under(kv_dir), store.stats()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail_after(int(calls), code, getattr(os, name)))
        with pytest.raises(StoreFullError, match=r"no room in .* MB free"):
            chunk.put(store)
    assert files_under(kv_dir) == before
    assert store.stats() == stats
    # It goes on when there is room again.
    assert chunk.put(store) > 0
    assert chunk.open(store) is not None


def test_partial_writes_are_continued(store, make_chunk, monkeypatch):
    chunk = make_chunk()
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, data: write(fd, data[:11]))
        chunk.put(store)
    assert chunk.open(store).read_layers(0, 3)[0].equal(chunk.kv.keys)


def test_other_write_error(store, kv_dir, make_chunk, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail_after(0, errno.EIO, os.write))
        with pytest.raises(StoreUnavailableError, match=r"could not be written.*set kv_dir"):
            make_chunk().put(store)
    assert files_under(kv_dir) == set()


def test_interrupted_put_leaves_nothing(store, kv_dir, make_chunk, monkeypatch):
    def interrupt(fd):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            make_chunk().put(store)
    assert files_under(kv_dir) == set()
    assert store.stats().chunks == 0


def test_index_without_room_takes_the_file_back(store, kv_dir, make_chunk, monkeypatch):
    def full(row, content):
        raise StoreFullError("no room for the index")

    with monkeypatch.context() as patch:
        patch.setattr(store._parts.index, "add", full)
        with pytest.raises(StoreFullError):
            make_chunk().put(store)
    assert files_under(kv_dir) == set()


WRITER = """
import os, signal, sys
sys.path[:0] = sys.argv[2:]
from conftest import build_chunk
from fused_kv_llm.store import KVStore, rebuild_index

store = KVStore(sys.argv[1])
build_chunk(1).put(store)
point = os.fsync
def die(fd):
    os.kill(os.getpid(), signal.SIGKILL)
os.fsync = die
build_chunk(2).put(store)
"""


def test_killed_writer_leaves_no_damage(kv_dir, make_chunk):
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run([sys.executable, "-c", WRITER, str(kv_dir), *paths], check=False, timeout=60)
    assert done.returncode == -9
    assert len(list((kv_dir / "tmp").iterdir())) == 1
    with KVStore(kv_dir) as store:
        assert list((kv_dir / "tmp").iterdir()) == []
        assert make_chunk(1).open(store).read_layers(0, 3)[0].equal(make_chunk(1).kv.keys)
        assert make_chunk(2).open(store) is None
        assert make_chunk(2).put(store) > 0


def test_killed_between_file_and_row(store, kv_dir, make_chunk, monkeypatch):
    """A file without a row is whole; storing the chunk again gives it its row."""
    chunk = make_chunk()

    def die(row, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store._parts.index, "add", die)
        with pytest.raises(KeyboardInterrupt):
            chunk.put(store)
    assert chunk.path(kv_dir).exists()
    assert store.contains([chunk.key]) == set()
    assert chunk.put(store) > 0
    assert store.contains([chunk.key]) == {chunk.key}


def dead_pid() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_only_abandoned_temp_files_are_removed(kv_dir):
    KVStore(kv_dir).close()
    host = StoreFolder(kv_dir, read_only=False).staging._host
    gone, here = dead_pid(), os.getpid()
    names = {
        f"a.{host}.{gone}.1": (0, False),
        f"a.{host}.{here}.2": (0, True),
        f"a.{host}.{here}.3": (3700, False),
        f"a.elsewhere.{gone}.4": (0, True),
        f"a.elsewhere.{gone}.5": (3700, False),
        f"a.{host}.{10**30}.6": (0, False),
        "what-is-this": (0, True),
        "what-was-this": (3700, False),
    }
    for name, (age_s, _) in names.items():
        path = kv_dir / "tmp" / name
        path.write_bytes(b"x")
        os.utime(path, (time.time() - age_s,) * 2)
    with KVStore(kv_dir, read_only=True):
        assert len(os.listdir(kv_dir / "tmp")) == len(names)
    KVStore(kv_dir).close()
    assert set(os.listdir(kv_dir / "tmp")) == {name for name, (_, stays) in names.items() if stays}


@pytest.mark.parametrize("garbage", [b"this is not a database at all, " * 40, b"SQLite format 3\0" + b"\xff" * 8000])
@pytest.mark.parametrize("read_only", [False, True])
def test_damaged_index(kv_dir, make_chunk, garbage, read_only):
    with KVStore(kv_dir) as store:
        make_chunk().put(store)
    (kv_dir / "index.sqlite").write_bytes(garbage)
    with pytest.raises(StoreUnavailableError, match=r"store check --fix"):
        KVStore(kv_dir, read_only=read_only)
    # That advice works.
    assert rebuild_index(kv_dir).read_bytes() == garbage
    with KVStore(kv_dir) as store:
        assert store.check(fix=True).by_kind == {"orphaned": 1}
        assert make_chunk().put(store) == 0
        assert make_chunk().open(store) is not None
    assert rebuild_index(kv_dir / "elsewhere") is None


def test_index_damaged_in_use(kv_dir, make_chunk):
    with KVStore(kv_dir) as store:
        for seed in range(40):
            make_chunk(seed).put(store)
    path = kv_dir / "index.sqlite"
    raw = bytearray(path.read_bytes())
    # The first page, which holds the schema, stays.
    raw[4096:] = os.urandom(len(raw) - 4096)
    path.write_bytes(raw)
    with pytest.raises(StoreUnavailableError, match=r"store check --fix"), KVStore(kv_dir) as store:
        store.contains([make_chunk(0).key])


def test_locked_index(kv_dir, make_chunk, monkeypatch):
    monkeypatch.setattr(database_module, "_BUSY_S", 0.05)
    with KVStore(kv_dir) as store:
        other = database_module.sqlite3.connect(kv_dir / "index.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="locked"):
            make_chunk().put(store)
        other.execute("ROLLBACK")
        other.close()
        assert make_chunk().put(store) > 0


@pytest.mark.parametrize(
    ("code", "text", "kind", "said"),
    [
        ("SQLITE_FULL", "database or disk is full", StoreFullError, "no room"),
        ("SQLITE_IOERR_SHMSIZE", "disk I/O error", StoreUnavailableError, "cannot be used now"),
        ("SQLITE_IOERR_WRITE", "disk I/O error", StoreUnavailableError, "cannot be used now"),
        ("SQLITE_CANTOPEN", "unable to open database file", StoreUnavailableError, "cannot be used now"),
        ("SQLITE_READONLY_DBMOVED", "attempt to write a readonly database", StoreUnavailableError, "cannot be used"),
        ("SQLITE_BUSY_SNAPSHOT", "database is locked", StoreUnavailableError, "locked"),
        ("SQLITE_CORRUPT_INDEX", "database disk image is malformed", IndexDamagedError, "damaged"),
        # The file's own words are in the message; they do not decide.
        ("SQLITE_CORRUPT", "malformed database schema (locked is full)", IndexDamagedError, "damaged"),
        ("SQLITE_NOTADB", "file is not a database", IndexDamagedError, "damaged"),
    ],
)
def test_errors_of_sqlite_are_told_apart(kv_dir, make_chunk, code, text, kind, said):
    """Only content that is wrong is damage, which ``check --fix`` takes for a reason to make a new index."""
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = getattr(sqlite3, code)
    with KVStore(kv_dir) as store:
        database = store._parts.index._database
        with pytest.raises(kind, match=said) as caught, database.connection():
            raise error
    assert type(caught.value) is kind
    assert ("check --fix" in str(caught.value)) == (kind is IndexDamagedError)
