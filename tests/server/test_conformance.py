"""LangChain's own conformance suite for chat models, through ``ChatOpenAI`` as it is, with the real SmolLM2."""

from __future__ import annotations

import gc
import re
from collections.abc import Iterator
from typing import Any

import pytest
from chat_conformance import SmolLM2Conformance
from corpus import SHORT
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from server.running import running

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.server import ServerConfig, create_app

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.heavy,
    # Both are about what ChatOpenAI does with its own answers.
    pytest.mark.filterwarnings("ignore:Pydantic serializer warnings:UserWarning"),
    pytest.mark.filterwarnings("ignore:Received a Pydantic BaseModel V1 schema:UserWarning"),
    # Its clients for asyncio leave their sockets to the garbage collector.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with FusedKVEngine(
        "smollm2-135m", kv_dir=tmp_path_factory.mktemp("conformance"), dtype="float32", preprocessing="none"
    ) as engine:
        engine.build_kv_cache(SHORT[:3], progress=False)
        with running(create_app(engine, ServerConfig())) as url:
            TestChatOpenAI.base_url = f"{url}/v1"
            yield
    gc.collect()


class TestChatOpenAI(SmolLM2Conformance):
    base_url: str
    stored_prompt = "\n\n".join([*SHORT[:3], "What about the ferries?"])

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": "smollm2-135m",
            "base_url": self.base_url,
            "api_key": "any",
            "temperature": 0,
            "stream_usage": True,
        }

    def changes(self, name: str) -> dict[str, Any]:
        if re.search("structured|json", name):
            # The most probable tokens of this model repeat themselves for ever.
            return {"max_tokens": 400, "temperature": 0.9, "seed": 3}
        return super().changes(name)
