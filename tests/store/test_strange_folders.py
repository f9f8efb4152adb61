"""Folders of a store in which somebody else has put something, or from which somebody has taken something."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from fused_kv_llm.store import KVStore


def age(path: Path) -> None:
    os.utime(path, (time.time() - 7200,) * 2, follow_symlinks=False)


def test_folders_in_tmp_are_left_alone(kv_dir: Path, tmp_path: Path) -> None:
    KVStore(kv_dir).close()
    kept = tmp_path / "kept"
    kept.write_text("x")
    folder, link, file = (kv_dir / "tmp" / name for name in ("folder", "link", "file"))
    folder.mkdir()
    (folder / "inside").write_text("y")
    with KVStore(kv_dir) as store:
        link.symlink_to(kept)
        file.write_text("z")
        for path in (folder, link, file):
            age(path)
        assert store.check(fix=True).by_kind == {"temporary": 2}
        assert store.check(fix=True).by_kind == {}
        assert store.collect_garbage() == (0, 0)
    KVStore(kv_dir).close()
    assert os.listdir(kv_dir / "tmp") == ["folder"]
    assert (folder / "inside").read_text() == "y"
    assert kept.read_text() == "x"


@pytest.mark.parametrize("name", ["tmp", "quarantine", "chunks"])
def test_a_folder_that_vanished_is_empty(store: KVStore, kv_dir: Path, make_chunk, name: str) -> None:
    make_chunk().put(store)
    shutil.rmtree(kv_dir / name)
    assert store.collect_garbage() == (0, 0)
    assert store.check().by_kind == ({"missing": 1} if name == "chunks" else {})


def test_a_damaged_file_is_moved_though_quarantine_vanished(store: KVStore, kv_dir: Path, make_chunk) -> None:
    chunk = make_chunk()
    chunk.put(store)
    chunk.path(kv_dir).write_bytes(b"no chunk")
    shutil.rmtree(kv_dir / "quarantine")
    assert store.check(fix=True).by_kind == {"damaged": 1}
    assert not chunk.path(kv_dir).exists()
    assert len(os.listdir(kv_dir / "quarantine")) == 1
