"""Tool calls are found in an answer however it streams, and what cannot be read as one is reported."""

from __future__ import annotations

from typing import Any

import pytest

from fused_kv_llm.decoding import CallStream, arguments_key, call_marker

HERMES = """Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>."""
CALL = '{"name": "f", "arguments": {"x": [1, {"y": "}"}]}}'
ARGS = {"x": [1, {"y": "}"}]}


@pytest.mark.parametrize("width", [1, 3, 1000])
@pytest.mark.parametrize(
    ("marker", "answer", "text", "args", "invalid"),
    [
        ("<tool_call>", f"Let me see. <tool_call>\n{CALL}\n</tool_call>", "Let me see. ", [ARGS], 0),
        ("<tool_call>", f"<tool_call>{CALL}</tool_call>\n<tool_call>\n{CALL}</tool_call>", "", [ARGS, ARGS], 0),
        ("<tool_call>", CALL, "", [ARGS], 0),
        ("<tool_call>", "<tool_call>\n{broken\n</tool_call>", "", [], 1),
        ("<tool_call>", f"<tool_call>{{broken</tool_call><tool_call>{CALL}</tool_call>", "", [ARGS], 1),
        ("<tool_call>", "if a < b then <tool", "if a < b then <tool", [], 0),
        ("<tool_call>", '{"colour": "red"} is JSON.', '{"colour": "red"} is JSON.', [], 0),
        ("[TOOL_CALLS]", f"[{CALL}]", "", [ARGS], 0),
        ("[TOOL_CALLS]", "[TOOL_CALLS]" + f"[{CALL}, {CALL}]", "", [ARGS, ARGS], 0),
        ("", '{"name": "f", "parameters": {"x": 1}}', "", [{"x": 1}], 0),
        ("", "plain [text] {here}", "plain [text] {here}", [], 0),
        ("<|tool_call|>", f"<|tool_call|>[{CALL}]", "", [ARGS], 0),
    ],
)
def test_calls_are_read_however_the_answer_streams(
    marker: str, answer: str, text: str, args: list[Any], invalid: int, width: int
) -> None:
    stream = CallStream(marker)
    shown = "".join(stream.push(answer[i : i + width]) for i in range(0, len(answer), width))
    result = stream.finish()
    assert shown + result.text == text
    assert [call.arguments for call in result.calls] == args
    assert len(result.invalid) == invalid


def test_templates_tell_how_calls_are_written() -> None:
    assert call_marker(HERMES) == "<tool_call>"
    llama = 'Respond in the format {"name": function name, "parameters": {...}} <|python_tag|> tools'
    assert (call_marker(llama), arguments_key(llama)) == ("<|python_tag|>", "parameters")
    assert arguments_key(HERMES) == "arguments"
