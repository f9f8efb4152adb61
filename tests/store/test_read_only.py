"""Stores in folders that cannot be written, as a crashed writer, a copy or a snapshot leaves them."""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from random_chunks import build_chunk

from fused_kv_llm.store import KVStore

CHUNKS = [build_chunk(seed) for seed in range(6)]
KEPT = {
    "log and shared memory": ("-wal", "-shm"),
    "log": ("-wal",),
    "empty log": ("-wal",),
    "shared memory": ("-shm",),
    "neither": (),
}
READER = """
import os, sys
sys.path[:0] = sys.argv[2:]
from random_chunks import build_chunk
from fused_kv_llm.store import KVStore
if os.getuid() == 0:
    os.setuid(65534)
assert not os.access(sys.argv[1], os.W_OK)
with KVStore(sys.argv[1], read_only=True) as store:
    print(store.stats().chunks, sum(build_chunk(seed).open(store) is not None for seed in range(6)))
"""


@pytest.fixture(name="copy", params=KEPT)
def _copy(request: pytest.FixtureRequest) -> Iterator[tuple[Path, int]]:
    """Return a copy of a store that was open when it was made, and how many of its chunks are in it."""
    # Where every user may come; pytest's own folders are private.
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        kv_dir, copy = Path(folder) / "kv", Path(folder) / "copy"
        with KVStore(kv_dir) as store:
            for chunk in CHUNKS[:4]:
                chunk.put(store)
            # Four chunks get into the index itself, two stay in the log.
            with sqlite3.connect(kv_dir / "index.sqlite") as connection:
                connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.close()
            if request.param != "empty log":
                for chunk in CHUNKS[4:]:
                    chunk.put(store)
            shutil.copytree(kv_dir, copy, ignore=shutil.ignore_patterns("index.sqlite-*"))
            for suffix in KEPT[request.param]:
                shutil.copy(f"{kv_dir}/index.sqlite{suffix}", copy)
        for path in copy.rglob("*"):
            path.chmod(0o555 if path.is_dir() else 0o444)
        copy.chmod(0o555)
        yield copy, 6 if request.param.startswith("log") else 4
        for path in [copy, *copy.rglob("*")]:
            path.chmod(0o700)


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".sqlite-shm"
    }


def test_every_row_is_there(copy: tuple[Path, int], monkeypatch: pytest.MonkeyPatch) -> None:
    kv_dir, number = copy
    before = contents(kv_dir)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found: list[int] = []
    with KVStore(kv_dir, read_only=True) as store:

        def read() -> None:
            found.append(store.stats().chunks)
            found.append(sum(chunk.open(store) is not None for chunk in CHUNKS))

        # Every thread has a connection of its own.
        for _ in range(2):
            thread = threading.Thread(target=read)
            thread.start()
            thread.join()
        read()
        # Rows that stayed behind in the log are reported, and only they.
        files = len(list(kv_dir.rglob("*.safetensors")))
        assert store.check().by_kind == ({"orphaned": files - number} if files > number else {})
    assert found == [number] * 6
    assert contents(kv_dir) == before


def test_another_user_reads_it(copy: tuple[Path, int]) -> None:
    kv_dir, number = copy
    before = contents(kv_dir)
    paths = [str(Path(__file__).parents[1]), *sys.path]
    run = [sys.executable, "-c", READER, str(kv_dir), *paths]
    done = subprocess.run(run, check=False, timeout=120, capture_output=True, text=True)
    if "Permission denied" in done.stderr and "site-packages" in done.stderr:
        pytest.skip("the interpreter's packages are not for every user to read")
    assert done.stdout.split() == [str(number)] * 2, done.stderr
    assert contents(kv_dir) == before
    assert stat.S_IMODE(kv_dir.stat().st_mode) == 0o555
