"""FusedKVLLM of LlamaIndex with a real model: completions, conversations, streams, options."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from event_loop import counted_ticks
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole, TextBlock
from llama_index.core.callbacks import CallbackManager, TokenCountingHandler
from llama_index.core.schema import NodeWithScore, TextNode
from pydantic import BaseModel

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError, CorpusError, PromptError
from fused_kv_llm.model import LoadedModel
from llama_index_fused_kv import FusedKVLLM

QUESTION = "How many passengers can the Aldebaran carry?"


def ask(nodes: list[TextNode]) -> str:
    return f"{nodes[0].text}\n\n{nodes[3].text}\n\nQuestion: {QUESTION}"


def test_completions_and_their_streams_agree_with_the_engine(llm: FusedKVLLM, nodes: list[TextNode]) -> None:
    prompt = ask(nodes)
    expected = llm.engine.generate(prompt, max_tokens=4, recompute_ratio=0.0).text
    response = llm.complete(prompt)
    assert response.text == expected
    assert response.raw["fused_kv"]["chunks_found"] == 2
    streamed = list(llm.stream_complete(prompt))
    assert "".join(piece.delta or "" for piece in streamed) == streamed[-1].text == expected
    assert [piece.raw for piece in streamed[:-1]] == [None] * (len(streamed) - 1)
    assert streamed[-1].raw["usage"] == response.raw["usage"]


def test_conversations_are_rendered_with_the_models_template(llm: FusedKVLLM, nodes: list[TextNode]) -> None:
    messages = [
        ChatMessage(role="system", content="You are terse."),
        ChatMessage(role="user", content=ask(nodes)),
        ChatMessage(role="assistant", content="412."),
        ChatMessage(role="user", content="And cars?"),
    ]
    plain = [{"role": str(m.role.value), "content": m.content} for m in messages]
    response = llm.chat(messages)
    assert response.message.role == MessageRole.ASSISTANT
    assert response.message.content == llm.engine.generate(plain, max_tokens=4, recompute_ratio=0.0).text
    assert response.raw["usage"]["prompt_tokens"] == len(llm.engine.encode(plain))
    assert response.raw["fused_kv"]["chunks_found"] == 2
    streamed = list(llm.stream_chat(messages))
    assert streamed[-1].message.content == "".join(p.delta or "" for p in streamed) == response.message.content


def test_asynchronous_calls_leave_the_loop_free(llm: FusedKVLLM, nodes: list[TextNode]) -> None:
    async def main() -> tuple[str, str, str, str, int]:
        message = [ChatMessage(content=ask(nodes))]
        async with counted_ticks() as ticks:
            completed, chatted = await asyncio.gather(llm.acomplete(ask(nodes)), llm.achat(message))
            stream = await llm.astream_complete(ask(nodes))
            pieces = "".join([piece.delta or "" async for piece in stream])
            chat = "".join([piece.delta or "" async for piece in await llm.astream_chat(message)])
        return completed.text, str(chatted.message.content), pieces, chat, ticks.count

    *answers, ticks = asyncio.run(main())
    assert set(answers) == {llm.complete(ask(nodes)).text}
    assert ticks > 5


def test_an_abandoned_asynchronous_stream_is_closed(llm: FusedKVLLM, nodes: list[TextNode]) -> None:
    async def main() -> None:
        stream = await llm.astream_complete(ask(nodes))
        async for _ in stream:
            break
        await stream.aclose()

    asyncio.run(main())
    assert llm.complete("Hello").text


def test_stop_and_options_of_a_call(llm: FusedKVLLM, nodes: list[TextNode]) -> None:
    whole = llm.complete(ask(nodes), max_tokens=10).text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    assert llm.complete(ask(nodes), max_tokens=10, stop=[stop]).text == whole[: whole.index(stop)]
    assert llm.complete(ask(nodes), max_tokens=10, stop=stop).text == whole[: whole.index(stop)]
    raw = llm.complete(ask(nodes), recompute_ratio=0.5).raw
    assert raw["fused_kv"]["recompute_ratio"] == 0.5
    with pytest.raises(ConfigError, match="max_new_tokens cannot be set"):
        llm.complete("Hello", max_new_tokens=3)


def test_token_counting_handler_sees_the_usage(engine: FusedKVEngine) -> None:
    counter = TokenCountingHandler(tokenizer=engine.token_ids)
    llm = FusedKVLLM.from_engine(engine, max_tokens=2, callback_manager=CallbackManager([counter]))
    usage = llm.chat([ChatMessage(content="Hello there")]).raw["usage"]
    assert counter.prompt_llm_token_count == usage["prompt_tokens"]
    assert counter.completion_llm_token_count == usage["completion_tokens"]


def test_metadata_comes_from_the_model(llm: FusedKVLLM) -> None:
    assert (llm.metadata.context_window, llm.metadata.num_output) == (8192, 4)
    assert llm.metadata.is_chat_model
    assert llm.metadata.model_name == "smollm2-135m"


class Ship(BaseModel):
    """A ship."""

    name: str
    passengers: int


def test_structured_prediction_always_parses(llm: FusedKVLLM, nodes: list[TextNode]) -> None:
    llm.max_tokens = 40
    template = PromptTemplate("{text}\n\nName the largest ship and how many passengers it carries.")
    ship = llm.structured_predict(Ship, template, text=nodes[0].text)
    assert isinstance(ship, Ship)
    assert asyncio.run(llm.astructured_predict(Ship, template, text=nodes[0].text)) == ship


def test_what_is_not_text_is_refused(llm: FusedKVLLM) -> None:
    picture = ChatMessage(blocks=[TextBlock(text="What is this?"), ImageBlock(image=b"\x89PNG")])
    with pytest.raises(PromptError, match="Message 0 holds a ImageBlock: this model reads text only"):
        llm.chat([picture])
    with pytest.raises(PromptError, match="no format for tools"):
        llm.chat([ChatMessage(content="Hi"), ChatMessage(role="tool", content="12")])


def test_a_second_template_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="messages_to_prompt: the model's chat template"):
        FusedKVLLM(kv_dir=tmp_path, messages_to_prompt=lambda messages: "hello")
    with pytest.raises(ConfigError, match="did you mean 'max_tokens'"):
        FusedKVLLM(kv_dir=tmp_path, max_token=3)


def test_a_model_without_a_template_gets_plain_text(llm: FusedKVLLM, tmp_path: Path) -> None:
    import copy
    from dataclasses import replace

    tokenizer = copy.deepcopy(llm.engine.tokenizer)
    tokenizer.chat_template = None
    loaded: LoadedModel = replace(llm.engine.loaded, tokenizer=tokenizer)
    with FusedKVEngine(loaded, kv_dir=tmp_path) as engine:
        base = FusedKVLLM.from_engine(engine, max_tokens=2)
        assert not base.metadata.is_chat_model
        raw = base.complete("Once upon a time").raw
        assert raw["usage"]["prompt_tokens"] == len(tokenizer("Once upon a time")["input_ids"])
        said = base.chat([ChatMessage(content="Once upon")]).raw["usage"]["prompt_tokens"]
        assert said == len(tokenizer("user: Once upon\nassistant: ")["input_ids"])


@pytest.mark.parametrize("wrong", ["one string", TextNode(text="a node"), [3]])
def test_what_is_not_a_list_of_nodes_is_refused(llm: FusedKVLLM, wrong: Any) -> None:
    with pytest.raises(CorpusError):
        llm.build_kv_cache(wrong, progress=False)


def test_nodes_in_any_form_are_ingested_and_deleted(llm: FusedKVLLM, nodes: list[TextNode]) -> None:
    report = llm.build_kv_cache([NodeWithScore(node=nodes[0]), nodes[1], nodes[2].text], progress=False)
    assert (report.chunks_new, report.chunks_present) == (0, 3)
    extra = TextNode(text="The ticket office at Skeldra sells no tickets for bicycles on Sundays in winter. " * 2)
    llm.build_kv_cache([extra], progress=False)
    assert llm.engine.chunk_id(extra.text)
    assert llm.delete_kv_cache([extra]) == 1
    assert llm.engine.chunk_id(extra.text) is None
