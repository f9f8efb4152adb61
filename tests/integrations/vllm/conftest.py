"""A store for spans of prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from fused_kv_llm.store import KVStore
from fused_kv_vllm.prefix_store import PrefixStore


@pytest.fixture
def kv_dir(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(kv_dir: Path) -> Iterator[PrefixStore]:
    made = PrefixStore(KVStore(kv_dir, memory_bytes=0))
    yield made
    made.close()
