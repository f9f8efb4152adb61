"""Small random chunks, and stores in temporary folders."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from random_chunks import Chunk, build_chunk

from fused_kv_llm.store import KVStore

__all__ = ["Chunk", "MakeChunk", "build_chunk", "put_and_check"]

MakeChunk = Callable[..., Chunk]


def put_and_check(kv_dir: Path) -> list[int]:
    """Open a store, put thirty chunks, read them, and return how many bytes each put wrote."""
    chunks = [build_chunk(seed) for seed in range(30)]
    with KVStore(kv_dir) as store:
        written = [chunk.put(store) for chunk in chunks]
        for chunk in chunks:
            with chunk.open(store) as stored:
                assert torch.equal(stored.read_layers(0, 3)[0], chunk.kv.keys)
    return written


@pytest.fixture(name="put_and_check", scope="session")
def _put_and_check() -> Callable[[Path], list[int]]:
    return put_and_check


@pytest.fixture(scope="session")
def make_chunk() -> MakeChunk:
    return build_chunk


@pytest.fixture
def kv_dir(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(kv_dir: Path) -> Iterator[KVStore]:
    with KVStore(kv_dir) as opened:
        yield opened


@pytest.fixture
def diskonly(kv_dir: Path) -> Iterator[KVStore]:
    with KVStore(kv_dir, memory_bytes=0) as opened:
        yield opened
