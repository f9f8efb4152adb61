"""ChatFusedKV: conversations, usage, tools, structured output, and what it refuses."""

from __future__ import annotations

import asyncio
import copy
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    FunctionMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
)
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.errors import ConfigError, MissingExtraError, PromptError
from langchain_fused_kv import ChatFusedKV, FusedKVLLM

QWEN = """{%- if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}{% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@tool
def get_weather(location: str) -> str:
    """Get the weather at a location."""
    return f"{location}: sunny"


@pytest.fixture
def chat(engine: FusedKVEngine) -> ChatFusedKV:
    return ChatFusedKV.from_engine(engine, max_tokens=8, recompute_ratio=0.0)


class _Recorder(BaseCallbackHandler):
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.messages: list[Any] = []

    def on_llm_new_token(self, token: str, **kwargs: Any) -> None:
        self.tokens.append(token)

    def on_llm_end(self, response: Any, **kwargs: Any) -> None:
        self.messages.append(response.generations[0][0].message)


def test_the_answer_usage_and_report(chat: ChatFusedKV, prompts: list[str]) -> None:
    messages = [SystemMessage("You are terse."), HumanMessage(prompts[0])]
    recorder = _Recorder()
    answer = chat.invoke(messages, config={"callbacks": [recorder]})
    plain = [{"role": "system", "content": "You are terse."}, {"role": "user", "content": prompts[0]}]
    expected = chat.engine.generate(plain, max_tokens=8, recompute_ratio=0.0)
    assert answer.content == expected.text
    usage = answer.usage_metadata
    assert usage["input_tokens"] == len(chat.engine.encode(plain)) == chat.get_num_tokens_from_messages(messages)
    assert usage["output_tokens"] == len(expected.token_ids)
    assert usage["input_token_details"]["cache_read"] == expected.report.cached_tokens > 100
    assert answer.response_metadata["model_name"] == "smollm2-135m"
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["fused_kv"]["chunks_found"] == 2
    # Callbacks, and with them every tracer, get the report.
    assert recorder.messages[0].response_metadata["fused_kv"] == answer.response_metadata["fused_kv"]


def test_streams_agree_and_end_with_the_report(chat: ChatFusedKV, prompts: list[str]) -> None:
    recorder = _Recorder()
    whole: Any = None
    for chunk in chat.stream(prompts[0], config={"callbacks": [recorder]}):
        whole = chunk if whole is None else whole + chunk
    answer = chat.invoke(prompts[0])
    assert isinstance(whole, AIMessageChunk)
    assert whole.content == answer.content == "".join(recorder.tokens)
    assert len(recorder.tokens) > 4
    assert whole.usage_metadata == answer.usage_metadata
    assert whole.response_metadata["fused_kv"]["chunks_found"] == 2


def test_asynchronous_calls_and_events(chat: ChatFusedKV, prompts: list[str]) -> None:
    async def main() -> tuple[list[str], list[str], list[str]]:
        answers = await chat.abatch(prompts[:2])
        streamed = [str(chunk.content) async for chunk in chat.astream(prompts[0])]
        events = [
            str(event["data"]["chunk"].content)
            async for event in chat.astream_events(prompts[0], version="v2")
            if event["event"] == "on_chat_model_stream"
        ]
        return [str(answer.content) for answer in answers], streamed, events

    answers, streamed, events = asyncio.run(main())
    assert answers == [str(answer.content) for answer in chat.batch(prompts[:2])]
    assert "".join(streamed) == "".join(events) == answers[0]


def test_stop_ends_the_answer(chat: ChatFusedKV, prompts: list[str]) -> None:
    whole = str(chat.invoke(prompts[0]).content)
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    answer = chat.invoke(prompts[0], stop=[stop])
    assert answer.content == whole[: whole.index(stop)]
    assert answer.response_metadata["finish_reason"] == "stop"


def test_it_shares_the_engine_of_the_text_model(tmp_path: Path) -> None:
    with FusedKVLLM(kv_dir=tmp_path) as llm, ChatFusedKV(kv_dir=tmp_path) as chat:
        assert chat.engine is llm.engine


def test_text_parts_are_joined_and_others_refused(chat: ChatFusedKV) -> None:
    parts = HumanMessage([{"type": "text", "text": "Good "}, "morning"])
    assert chat.invoke([parts]).content == chat.invoke("Good morning").content
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(PromptError, match=r"Message 1 holds a content part of type 'image_url'.*reads text only"):
        chat.invoke([SystemMessage("See."), HumanMessage([{"type": "text", "text": "What is this?"}, image])])
    with pytest.raises(PromptError, match="FunctionMessage, which has no role"):
        chat.invoke([FunctionMessage("12", name="f")])
    assert chat.invoke([ChatMessage("Hello", role="user")]).content == chat.invoke("Hello").content


def test_system_text_after_the_chunks(chat: ChatFusedKV, prompts: list[str]) -> None:
    answer = chat.invoke([HumanMessage(prompts[0]), SystemMessage("Answer in one word, in capital letters, please.")])
    assert answer.response_metadata["fused_kv"]["chunks_found"] == 2


def test_a_model_without_a_chat_template_is_refused(chat: ChatFusedKV, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(chat.engine.tokenizer)
    tokenizer.chat_template = None
    with FusedKVEngine(replace(chat.engine.loaded, tokenizer=tokenizer), kv_dir=tmp_path) as base:
        with pytest.raises(ConfigError, match=r"has no chat template.*FusedKVLLM"):
            ChatFusedKV.from_engine(base)
        assert not base.closed, "it is the caller's, who may use it otherwise"


def test_a_timeout_gives_up(chat: ChatFusedKV, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(0, 10_000, 10))
    monkeypatch.setattr("langchain_fused_kv.chat_models.time.perf_counter", lambda: float(next(ticks)))
    with pytest.raises(TimeoutError, match="timeout=5 seconds"):
        chat.invoke(prompts[0], timeout=5)
    monkeypatch.setattr("langchain_fused_kv.chat_models.time.perf_counter", time.monotonic)
    assert chat.invoke("Hello", timeout=600).content


# -- structured output ---------------------------------------------------------------------------------------------


class Ship(BaseModel):
    """A ship."""

    name: str = Field(description="the ship's name")
    decks: list[str]
    speed: float | None = None


@pytest.mark.parametrize("max_tokens", [24, 40])
def test_answers_have_the_schema_even_in_few_tokens(chat: ChatFusedKV, prompts: list[str], max_tokens: int) -> None:
    structured = chat.bind(max_tokens=max_tokens, temperature=1.3, seed=max_tokens)
    schema = Ship.model_json_schema()
    wanted = {"type": "json_schema", "schema": schema}
    answer = structured.invoke(prompts[0], response_format=wanted)
    jsonschema.validate(json.loads(str(answer.content)), schema)


def test_an_answer_that_had_to_be_shortened_says_so(chat: ChatFusedKV) -> None:
    schema = {"type": "object", "properties": {"story": {"type": "string"}}, "required": ["story"]}
    wanted = {"type": "json_schema", "schema": schema}
    answer = chat.bind(max_tokens=16).invoke("Tell me a long story about a ferry.", response_format=wanted)
    assert len(json.loads(str(answer.content))["story"]) > 16
    assert answer.response_metadata["finish_reason"] == "length"


def test_structured_output_in_its_three_ways(engine: FusedKVEngine, prompts: list[str]) -> None:
    chat = ChatFusedKV.from_engine(engine, max_tokens=32, tools_in_prompt=True)
    assert isinstance(chat.with_structured_output(Ship).invoke(prompts[0]), Ship)
    assert isinstance(chat.with_structured_output(Ship, method="function_calling").invoke(prompts[0]), Ship)
    raw = chat.with_structured_output(Ship, include_raw=True).invoke(prompts[0])
    assert raw["parsed"] == Ship.model_validate_json(raw["raw"].content)
    loose = chat.with_structured_output(Ship.model_json_schema(), method="json_mode").invoke(prompts[0])
    jsonschema.validate(loose, Ship.model_json_schema())
    with pytest.raises(ConfigError, match="method='xml'"):
        chat.with_structured_output(Ship, method="xml")  # type: ignore[arg-type]


def test_a_missing_library_names_its_extra(chat: ChatFusedKV, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=r"fused-kv-llm\[structured\]"):
        chat.with_structured_output(Ship).invoke("Hello")


# -- tools ---------------------------------------------------------------------------------------------------------


def test_a_template_without_tools_says_so(chat: ChatFusedKV) -> None:
    with pytest.raises(ConfigError, match=r"no format for tools.*tools_in_prompt=True"):
        chat.bind_tools([get_weather])
    call = AIMessage("", tool_calls=[{"name": "get_weather", "args": {"location": "Rome"}, "id": "1"}])
    with pytest.raises(PromptError, match="no format for tools"):
        chat.invoke([HumanMessage("Weather?"), call, ToolMessage("sunny", tool_call_id="1")])


@pytest.fixture
def calling(engine: FusedKVEngine, tmp_path: Path) -> Any:
    """SmolLM2 with a chat template that has tools."""
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.chat_template = QWEN
    with FusedKVEngine(replace(engine.loaded, tokenizer=tokenizer), kv_dir=tmp_path) as made:
        yield ChatFusedKV.from_engine(made, max_tokens=24)


@pytest.mark.parametrize("choice", ["any", "get_weather", True, {"function": {"name": "get_weather"}}])
def test_forced_calls_through_the_template(calling: ChatFusedKV, choice: Any) -> None:
    bound = calling.bind_tools([get_weather], tool_choice=choice)
    answer = bound.invoke("What is the weather in Rome?")
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert isinstance(call["args"]["location"], str)
    assert (answer.content, answer.response_metadata["finish_reason"]) == ("", "tool_calls")
    whole: Any = None
    for chunk in bound.stream("What is the weather in Rome?"):
        whole = chunk if whole is None else whole + chunk
    assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(call["name"], call["args"])]


def test_tools_and_results_are_rendered_by_the_template(calling: ChatFusedKV) -> None:
    call = AIMessage("", tool_calls=[{"name": "get_weather", "args": {"location": "Rome"}, "id": "1"}])
    history = [HumanMessage("Weather?"), call, ToolMessage("Rome: sunny", tool_call_id="1")]
    bound = calling.bind_tools([get_weather], tool_choice="auto")
    assert bound.invoke(history).usage_metadata["output_tokens"] > 0
    tools = [convert_to_openai_tool(get_weather)]
    rendered = calling.engine.renderer.render(calling._prompt(history, tools)).text
    assert '"location": "Rome"' in rendered
    assert "Get the weather at a location" in rendered
    assert "tool\nRome: sunny" in rendered
    assert calling.get_num_tokens_from_messages(history, [get_weather]) == len(
        calling.engine.encode(calling._prompt(history, tools))
    )


def test_a_tool_call_cannot_smuggle_special_tokens(calling: ChatFusedKV) -> None:
    call = AIMessage("", tool_calls=[{"name": "get_weather", "args": {"location": "<|im_end|>"}, "id": "1"}])
    with pytest.raises(PromptError, match="tool call of message 0 holds the text of a special token"):
        calling.invoke([call])


def test_an_unknown_choice_is_named(calling: ChatFusedKV) -> None:
    with pytest.raises(ConfigError, match="tool_choice='get_time' is not one of the tools get_weather"):
        calling.bind_tools([get_weather], tool_choice="get_time")
