"""Chat and completions: what OpenAI's protocol says, with the answers of the engine."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from corpus import SHORT, rag_prompt
from server.running import events

from fused_kv_llm import FusedKVEngine
from fused_kv_llm.prompt import RawPrompt

PROMPT = rag_prompt(SHORT[:3], "What about the ferries?")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": PROMPT}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather somewhere.",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]},
    },
}


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 6, "temperature": 0, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def streamed(client: httpx.Client, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "max_tokens": 6, "temperature": 0, "stream": True, **fields}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def test_the_answer_is_the_engine_s(client: httpx.Client, engine: FusedKVEngine) -> None:
    want = engine.generate(MESSAGES, max_tokens=6)
    answer = ask(client)
    choice = answer["choices"][0]
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    assert choice["message"] == {"role": "assistant", "content": want.text, "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"]) == ("length", None)
    tokens = len(engine.encode(MESSAGES))
    usage = answer["usage"]
    assert usage == {
        "prompt_tokens": tokens,
        "completion_tokens": 6,
        "total_tokens": tokens + 6,
        "prompt_tokens_details": {"cached_tokens": answer["fused_kv"]["cached_tokens"]},
    }
    assert answer["fused_kv"]["chunks_found"] == 3


def test_a_stream_has_the_protocol_s_chunks(client: httpx.Client, engine: FusedKVEngine) -> None:
    want = engine.generate(MESSAGES, max_tokens=6)
    chunks = streamed(client, messages=MESSAGES, stream_options={"include_usage": True})
    *parts, usage = chunks
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["model"] == "tiny" for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in parts)
    choices = [chunk["choices"][0] for chunk in parts]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(choice["delta"]["content"] for choice in choices[1:-1]) == want.text
    assert (choices[-1]["delta"], choices[-1]["finish_reason"]) == ({}, "length")
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    assert parts[-1]["fused_kv"]["chunks_found"] == 3
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 6)
    assert all("usage" not in chunk for chunk in streamed(client, messages=MESSAGES))


def test_several_answers_to_one_prompt(client: httpx.Client, engine: FusedKVEngine) -> None:
    options = {"temperature": 0.9, "seed": 3, "top_p": 0.9}
    want = [engine.generate(MESSAGES, max_tokens=6, **{**options, "seed": 3 + n}).text for n in range(3)]
    answer = ask(client, n=3, **options)
    assert [choice["message"]["content"] for choice in answer["choices"]] == want
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens"] == len(engine.encode(MESSAGES))
    assert len(answer["fused_kv"]) == 3
    got = ["", "", ""]
    for chunk in streamed(client, messages=MESSAGES, n=3, **options):
        for choice in chunk["choices"]:
            got[choice["index"]] += choice["delta"].get("content", "")
    assert got == want


def test_stop_strings_and_contents_in_parts(client: httpx.Client, engine: FusedKVEngine) -> None:
    text = engine.generate(PROMPT, max_tokens=6).text
    stop = text[len(text) // 2 :][:3]
    parts = [{"type": "text", "text": PROMPT[:40]}, {"type": "text", "text": PROMPT[40:]}]
    choice = ask(client, messages=[{"role": "user", "content": parts}], stop=stop)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_logprobs(client: httpx.Client, engine: FusedKVEngine) -> None:
    want = engine.generate(MESSAGES, max_tokens=6, logprobs=2).logprobs
    content = ask(client, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [one["logprob"] for one in content] == pytest.approx([one.logprob for one in want], abs=1e-4)
    for one, token in zip(content, want, strict=True):
        assert one["token"] == engine.tokenizer.decode([token.token_id])
        assert len(one["top_logprobs"]) == 2
        assert one["bytes"] is None or bytes(one["bytes"]).decode() == one["token"]
    chunks = streamed(client, messages=MESSAGES, logprobs=True, top_logprobs=2)
    got = [one for chunk in chunks for one in ((chunk["choices"][0]["logprobs"] or {}).get("content") or ())]
    assert [one["token"] for one in got] == [one["token"] for one in content]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_an_answer_in_a_form(client: httpx.Client, kind: str) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    wanted: dict[str, Any] = {"type": kind}
    if kind == "json_schema":
        wanted["json_schema"] = {"name": "a", "schema": schema, "strict": True}
    choice = ask(client, response_format=wanted, max_tokens=60)["choices"][0]
    parsed = json.loads(choice["message"]["content"])
    assert isinstance(parsed["x"] if kind == "json_schema" else parsed, int if kind == "json_schema" else dict)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_tool_calls(client: httpx.Client, choice: Any) -> None:
    options = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 80, "messages": MESSAGES}
    answer = ask(client, **options)["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert (answer["finish_reason"], answer["message"]["content"], call["type"]) == ("tool_calls", None, "function")
    assert call["function"]["name"] == "weather"
    assert isinstance(json.loads(call["function"]["arguments"])["days"], int)
    chunks = [chunk["choices"][0] for chunk in streamed(client, **options)]
    (delta,) = [one["delta"]["tool_calls"] for one in chunks if "tool_calls" in one["delta"]]
    assert delta[0]["function"] == call["function"]
    assert (delta[0]["index"], chunks[-1]["finish_reason"]) == (0, "tool_calls")
    # The call and its result go back into the conversation.
    reply = [{"role": "assistant", "content": None, "tool_calls": [call]},
             {"role": "tool", "tool_call_id": call["id"], "content": "Rain."}]  # fmt: skip
    assert ask(client, messages=[*MESSAGES, *reply], tools=[WEATHER])["choices"][0]["message"]["content"]


def test_tools_that_may_not_be_called_are_not_shown(client: httpx.Client) -> None:
    with_none, without = (ask(client, **options) for options in ({"tools": [WEATHER], "tool_choice": "none"}, {}))
    assert with_none["usage"]["prompt_tokens"] == without["usage"]["prompt_tokens"]


def test_how_it_is_fused_can_be_said(client: httpx.Client, engine: FusedKVEngine) -> None:
    engine.clear_prefix_cache()
    full = ask(client, fused_kv={"recompute_ratio": 1.0})
    assert full["fused_kv"]["reused_tokens"] == 0
    engine.clear_prefix_cache()
    reused = ask(client, fused_kv={"recompute_ratio": 0.0, "selector": "random"})
    assert (reused["fused_kv"]["recomputed_tokens"], reused["fused_kv"]["selector"]) == (0, "random")
    assert reused["usage"]["prompt_tokens_details"]["cached_tokens"] > 100


def test_completions_go_on_with_the_text(client: httpx.Client, engine: FusedKVEngine) -> None:
    texts = ["Once upon a time", PROMPT]
    want = [engine.generate(RawPrompt(text), max_tokens=6, logprobs=1) for text in texts]
    body = {"model": "tiny", "prompt": texts, "max_tokens": 6, "temperature": 0, "logprobs": 1}
    answer = client.post("/v1/completions", json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in want]
    assert answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == sum(one.report.prompt_tokens for one in want)
    logprobs = answer["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == want[0].text
    assert logprobs["token_logprobs"] == pytest.approx([one.logprob for one in want[0].logprobs], abs=1e-4)
    assert logprobs["text_offset"][0] == 0
    got = ["", ""]
    for chunk in streamed(client, "/v1/completions", prompt=texts):
        got[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert got == [one.text for one in want]


def test_a_chunk_is_reused_in_a_completion(client: httpx.Client, engine: FusedKVEngine) -> None:
    engine.clear_prefix_cache()
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    answer = client.post("/v1/completions", json=body).json()
    assert answer["fused_kv"]["chunks_found"] == 3
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 50
