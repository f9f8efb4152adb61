"""LangChain's own conformance suites, against the real SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_conformance import SmolLM2Conformance
from langchain_community.vectorstores import FAISS
from langchain_core.language_models import BaseChatModel
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from fused_kv_llm import FusedKVEngine
from langchain_fused_kv import ChatFusedKV, FusedKVLLM, FusedKVRetriever

PASSAGE = "The lighthouse on Ulvane Point is 38 metres high, was built of granite in 1874 and is lit by one lamp. " * 3


@pytest.fixture(scope="module", autouse=True)
def _shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the engine alive, so that every model of these suites shares it."""
    _Suite.folder = tmp_path_factory.mktemp("conformance")
    with ChatFusedKV(kv_dir=_Suite.folder) as kept:
        kept.build_kv_cache([PASSAGE], progress=False)
        yield


class _Suite:
    folder: Path

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatFusedKV

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # SmolLM2's chat template has no format for tools.
        return {"model": "smollm2-135m", "kv_dir": self.folder, "tools_in_prompt": True}


class TestUnit(_Suite, ChatModelUnitTests):
    pass


class TestIntegration(_Suite, SmolLM2Conformance):
    stored_prompt = f"{PASSAGE}\n\nHow high is the lighthouse?"


class TestRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def _parts(self, vector_store: FAISS, engine: FusedKVEngine) -> None:
        type(self).parts = {"store": vector_store, "llm": FusedKVLLM.from_engine(engine)}

    parts: dict[str, Any]

    @property
    def retriever_constructor(self) -> Any:
        def construct(k: int = 4) -> BaseRetriever:
            inner = self.parts["store"].as_retriever(search_kwargs={"k": k})
            return FusedKVRetriever(retriever=inner, llm=self.parts["llm"])

        return construct

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {}

    @property
    def retriever_query_example(self) -> str:
        return "How many passengers can the Aldebaran carry?"
