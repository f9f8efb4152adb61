"""One real model, one real corpus and one engine for all tests of the framework adapters."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.passages import Passage, read_passages


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    handbook = Path(str(files("fused_kv_llm.demo") / "handbook"))
    return read_passages([handbook / "01-fleet.txt", handbook / "12-history.txt"])


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory, passages: list[Passage]) -> Iterator[FusedKVEngine]:
    with FusedKVEngine("smollm2-135m", kv_dir=tmp_path_factory.mktemp("kv"), prefix_cache_bytes=0) as made:
        made.build_kv_cache([passage.text for passage in passages], preprocess="wait", progress=False)
        yield made
