"""LangChain's own conformance suites, against the real SmolLM2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_community.vectorstores import FAISS
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
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

    @property
    def supports_json_mode(self) -> bool:
        return True


class TestUnit(_Suite, ChatModelUnitTests):
    pass


class TestIntegration(_Suite, ChatModelIntegrationTests):
    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> BaseChatModel:
        # Arguments after a long tool name, and a Chinese name, take many tokens; all else is as well tested with few.
        tokens = 48 if re.search("unicode|bind_runnables|tool_calling", request.node.name) else 20
        params = {**self.standard_chat_model_params, **self.chat_model_params, **getattr(request, "param", {})}
        return ChatFusedKV(**{**params, "max_tokens": tokens})

    @property
    def supported_usage_metadata_details(self) -> dict[str, Any]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = ChatFusedKV(**self.chat_model_params, max_tokens=4)
        prompt = f"{PASSAGE}\n\nHow high is the lighthouse?"
        if not stream:
            return model.invoke(prompt)
        chunks = list(model.stream(prompt))
        return sum(chunks[1:], start=chunks[0])  # type: ignore[return-value]

    @pytest.mark.xfail(reason="SmolLM2-135M does not decide by itself to call a tool", strict=True)
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)


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
