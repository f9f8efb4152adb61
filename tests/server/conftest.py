"""A server with a tiny model, and one with SmolLM2, for all tests of a process."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from corpus import SHORT
from models import smollm2_tokenizer, tiny_model
from server.running import running

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32", "store_misses": False, "max_queued": 2}
    folder = tmp_path_factory.mktemp("server")
    with FusedKVEngine(tiny_model(), tokenizer=smollm2_tokenizer(), kv_dir=folder, max_num_seqs=4, **options) as made:
        made.build_kv_cache(SHORT[:4], progress=False)
        yield made


@pytest.fixture(scope="session")
def url(engine: FusedKVEngine) -> Iterator[str]:
    with running(create_app(engine, ServerConfig(model_name="tiny", max_answer_tokens=64))) as found:
        yield found


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as made:
        yield made
