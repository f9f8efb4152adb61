"""Small random chunks, and stores in temporary folders."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from random_chunks import Chunk, build_chunk
from services import Remote, redis_server, s3_server

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


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    with redis_server() as (url, _):
        yield url


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    with s3_server() as url:
        yield url


@pytest.fixture(params=["file", "redis", "s3"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Remote:
    name = uuid.uuid4().hex
    if request.param == "file":
        return Remote(f"file://{tmp_path}/remote")
    if request.param == "redis":
        return Remote(request.getfixturevalue("redis_url"), {"prefix": f"{name}:"})
    keys = {"key": "test", "secret": "test", "endpoint_url": request.getfixturevalue("s3_url")}
    return Remote(f"s3://bucket-{name}/some/folder", keys)
