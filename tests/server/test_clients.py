"""Clients that people have, unchanged, with a real model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest
from corpus import SHORT, rag_prompt
from langchain_openai import ChatOpenAI
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from server.running import events, running

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.demo import handbook_folder
from fused_kv_llm.server import ServerConfig, create_app

pytestmark = pytest.mark.real_model

KEY = "the-key-of-the-clients"
PROMPT = rag_prompt(SHORT[:3], "What about the ferries?")


class Town(BaseModel):
    """A town."""

    name: str


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FusedKVEngine]:
    options = {"preprocessing": "none", "dtype": "float32"}
    with FusedKVEngine("smollm2-135m", kv_dir=tmp_path_factory.mktemp("clients"), **options) as made:
        made.build_kv_cache(SHORT[:3], progress=False)
        yield made


@pytest.fixture(scope="module")
def base(engine: FusedKVEngine) -> Iterator[str]:
    with running(create_app(engine, ServerConfig(api_keys={"": KEY}))) as url:
        yield f"{url}/v1"


@pytest.fixture(scope="module")
def want(engine: FusedKVEngine) -> str:
    return engine.generate(PROMPT, max_tokens=8).text


def test_openai(base: str, want: str) -> None:
    with openai.OpenAI(base_url=base, api_key=KEY) as client:
        (model,) = client.models.list().data
        asked = {
            "model": model.id,
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 8,
            "temperature": 0,
        }
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].message.content == want
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details.cached_tokens > 50
        assert answer.fused_kv["chunks_found"] == 3
        stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == want
        assert chunks[-1].usage.completion_tokens == 8
        # Drawn at random, a name may be longer than there is room for.
        town = {**asked, "messages": [{"role": "user", "content": "Name a town."}], "max_tokens": 40}
        parsed = client.chat.completions.parse(**town, response_format=Town)
        assert isinstance(parsed.choices[0].message.parsed, Town)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**asked, "model": "gpt-5"})
        with pytest.raises(openai.BadRequestError, match="frequency_penalty"):
            client.chat.completions.create(**asked, frequency_penalty=1)
    with openai.OpenAI(base_url=base, api_key="wrong") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_langchain(base: str, want: str) -> None:
    llm = ChatOpenAI(model="smollm2-135m", base_url=base, api_key=KEY, max_tokens=8, temperature=0)
    answer = llm.invoke(PROMPT)
    assert answer.content == want
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 50
    assert answer.response_metadata["finish_reason"] == "length"
    assert "".join(str(chunk.content) for chunk in llm.stream(PROMPT)) == want
    town = llm.with_structured_output(Town, method="json_schema").invoke("Name a town.", max_tokens=40)
    assert isinstance(town, Town)
    called = llm.with_structured_output(Town, method="function_calling").invoke("Name a town.", max_tokens=60)
    assert isinstance(called, Town)

    async def at_once() -> list[str]:
        return [str(one.content) for one in await llm.abatch([PROMPT] * 4)]

    assert asyncio.run(at_once()) == [want] * 4


def test_llama_index(base: str, want: str) -> None:
    llm = OpenAILike(
        model="smollm2-135m", api_base=base, api_key=KEY, is_chat_model=True, max_tokens=8, temperature=0,
        context_window=8192,
    )  # fmt: skip
    assert llm.chat([ChatMessage(role="user", content=PROMPT)]).message.content == want
    *_, last = llm.stream_chat([ChatMessage(role="user", content=PROMPT)])
    assert last.message.content == want
    completing = llm.model_copy(update={"is_chat_model": False})
    assert completing.complete("Once upon a time").text


def test_an_unchanged_client_is_answered_from_documents(base: str) -> None:
    """The server alone is a RAG application: the answer is in the document, and its KV is reused."""
    with httpx.Client(base_url=base, headers={"authorization": f"Bearer {KEY}"}, timeout=120) as client:
        file = handbook_folder() / "01-fleet.txt"
        made = client.post("/documents", files={"file": (file.name, file.read_bytes())}).json()
        told = events(client.get(f"/jobs/{made['job_id']}/events").text)
        assert told[-1]["state"] == "done"
        with openai.OpenAI(base_url=base, api_key=KEY) as asked:
            answer = asked.chat.completions.create(
                model="smollm2-135m",
                messages=[{"role": "user", "content": "How many passengers can the Aldebaran carry?"}],
                max_tokens=48,
                temperature=0,
                extra_body={"fused_kv": {"retrieve": {"k": 2}}},
            )
        assert "412" in (answer.choices[0].message.content or "")
        report = answer.model_extra["fused_kv"]
        assert {chunk["document_id"] for chunk in report["retrieved"]} == {made["id"]}
        assert report["chunks_found"] == len(report["retrieved"]) == 2
        assert answer.usage.prompt_tokens_details.cached_tokens > 200
