"""Nodes, an index and an LLM on the shared engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from llama_index.core import Settings
from llama_index.core.schema import TextNode

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo.llama_embedder import MiniLMEmbedding
from fused_kv_llm.demo.passages import Passage
from llama_index_fused_kv import FusedKVIndex, FusedKVLLM


@pytest.fixture(scope="session")
def embed_model() -> MiniLMEmbedding:
    return MiniLMEmbedding()


@pytest.fixture(scope="session")
def nodes(passages: list[Passage]) -> list[TextNode]:
    return [
        TextNode(text=f"{passage.text}\n", metadata={"file_name": Path(passage.source).name}, id_=f"node-{number}")
        for number, passage in enumerate(passages)
    ]


@pytest.fixture(scope="session")
def index(nodes: list[TextNode], embed_model: MiniLMEmbedding) -> FusedKVIndex:
    return FusedKVIndex(nodes, embed_model=embed_model)


@pytest.fixture
def llm(engine: FusedKVEngine, monkeypatch: pytest.MonkeyPatch) -> FusedKVLLM:
    made = FusedKVLLM.from_engine(engine, max_tokens=4, recompute_ratio=0.0)
    # What the query engine splits and packs with; the default counts another model's tokens.
    monkeypatch.setattr(Settings, "_tokenizer", made.get_token_ids)
    return made
