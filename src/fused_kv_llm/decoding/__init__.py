"""From logits to an answer: sampling, text, stop strings, constraints and tool calls."""

from __future__ import annotations

from fused_kv_llm.decoding.answer_schema import answer_schema
from fused_kv_llm.decoding.end_tokens import end_token_ids
from fused_kv_llm.decoding.json_constraint import JSONConstraint, json_constraint
from fused_kv_llm.decoding.logprobs import TokenLogprobs, token_logprobs
from fused_kv_llm.decoding.sampling import Constraint, TokenSampler
from fused_kv_llm.decoding.text_stream import TextStream
from fused_kv_llm.decoding.tool_calls import (
    CallStream,
    ToolAnswer,
    ToolCall,
    arguments_key,
    call_marker,
    call_schema,
    chosen_tool,
    tools_in_system_message,
)

__all__ = [
    "CallStream",
    "Constraint",
    "JSONConstraint",
    "TextStream",
    "TokenLogprobs",
    "TokenSampler",
    "ToolAnswer",
    "ToolCall",
    "answer_schema",
    "arguments_key",
    "call_marker",
    "call_schema",
    "chosen_tool",
    "end_token_ids",
    "json_constraint",
    "token_logprobs",
    "tools_in_system_message",
]
