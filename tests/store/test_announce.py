"""Telling the system what will be read soon: exactly those bytes, and nothing that is there already."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fused_kv_llm.errors import ConfigError, StoreError
from fused_kv_llm.store import KVStore
from fused_kv_llm.store.read import pieces

NAME, SECRET = "rows", "0123456789abcdef" * 4


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The offsets of all bytes that were announced."""
    found: set[int] = set()

    def note(fd: int, offset: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        assert 0 <= offset < offset + nbytes <= os.fstat(fd).st_size
        found.update(range(offset, offset + nbytes))

    monkeypatch.setattr(os, "posix_fadvise", note, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    monkeypatch.setattr(pieces, "CAN_ANNOUNCE", True)
    return found


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The offsets of all bytes of tensors that were read."""
    found: set[int] = set()
    read = os.preadv

    def note(fd: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        count = read(fd, buffers, offset, *flags)
        found.update(range(offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", note)
    return found


@pytest.mark.parametrize("secret", [None, SECRET], ids=["plain", "encrypted"])
def test_what_is_announced_is_what_is_read(
    kv_dir: Path, make_chunk, secret: str | None, announced: set[int], taken: set[int]
) -> None:
    if secret:
        pytest.importorskip("cryptography")
    chunk = make_chunk()
    with KVStore(kv_dir, memory_bytes=0, encryption_key=secret) as store:
        chunk.put(store)
        store.sidecars.put(chunk.key, NAME, {"x": torch.rand(6, 5), "y": torch.rand(6, 3, 2)}, by_rows=True)
        with chunk.open(store) as stored:
            taken.clear()
            stored.announce_layers(1, 3)
            assert announced
            assert not taken
            stored.read_layers(1, 3)
            assert announced == taken
        reader = store.sidecars.open(chunk.key, NAME)
        assert reader is not None
        announced.clear()
        taken.clear()
        reader.announce(2, 5)
        assert announced
        assert not taken
        reader.read(2, 5)
        assert announced == taken
        reader.close()
        announced.clear()
        reader.announce(0, 1)
        assert not announced


def test_what_is_in_memory_is_not_announced(store: KVStore, make_chunk, announced: set[int]) -> None:
    chunk = make_chunk()
    chunk.put(store)
    with chunk.open(store) as stored:
        stored.read_layers(0, 2)
        stored.announce_layers(0, 2)
        assert not announced
        stored.announce_layers(0, 3)
        assert announced
        stored.read_layers(0, 3)
        announced.clear()
        stored.announce_layers(0, 3)
    with chunk.open(store) as stored:
        assert stored.tier == "memory"
        stored.announce_layers(0, 3)
    assert not announced


def test_a_system_that_refuses_changes_nothing(store: KVStore, make_chunk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError("not supported")

    chunk = make_chunk()
    chunk.put(store)
    store.drop_memory()
    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    with chunk.open(store) as stored:
        stored.announce_layers(0, 3)
        assert torch.equal(stored.read_layers(0, 3)[0], chunk.kv.keys)
    with pytest.raises(StoreError, match="closed"):
        stored.announce_layers(0, 1)


def test_layers_that_are_not_there_cannot_be_announced(store: KVStore, make_chunk) -> None:
    chunk = make_chunk()
    chunk.put(store)
    with chunk.open(store) as stored, pytest.raises(ConfigError, match="not a range"):
        stored.announce_layers(2, 9)
