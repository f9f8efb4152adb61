"""An answer of the engine as LangChain's results: messages, usage and metadata."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult

from fused_kv_llm.decoding import ToolAnswer

__all__ = ["AnswerPiece", "chat_chunk", "chat_result"]

_NOT_A_CALL = "it is not JSON with a name and arguments"

AnswerPiece = tuple[str, ToolAnswer, dict[str, Any]]
"""Text, tool calls and the result of ``Runtime.finish``; the last two are empty except in the last piece."""


def chat_result(pieces: Sequence[AnswerPiece], model_id: str) -> ChatResult:
    """Return a whole answer.

    Parameters
    ----------
    pieces : sequence of AnswerPiece
        All of them.
    model_id : str
    """
    text = "".join(piece for piece, _, _ in pieces)
    _, answer, info = pieces[-1]
    message = AIMessage(
        content=text,
        tool_calls=[tool_call(name=call.name, args=call.arguments, id=call.id) for call in answer.calls],
        invalid_tool_calls=[invalid_tool_call(args=unread, error=_NOT_A_CALL) for unread in answer.invalid],
        usage_metadata=_usage(info),
        response_metadata=_metadata(info, model_id),
    )
    generation_info = {name: value for name, value in info.items() if name != "token_usage"}
    return ChatResult(
        generations=[ChatGeneration(message=message, generation_info=generation_info)],
        llm_output={"token_usage": info["token_usage"], "model_name": model_id},
    )


def chat_chunk(piece: AnswerPiece, model_id: str) -> ChatGenerationChunk:
    """Return one piece of an answer that is streamed; the last one has the calls, the usage and the report.

    Parameters
    ----------
    piece : AnswerPiece
    model_id : str
    """
    text, answer, info = piece
    if not info:
        return ChatGenerationChunk(message=AIMessageChunk(content=text))
    calls: list[tuple[str, str, str | None]] = [
        (call.name, json.dumps(call.arguments, ensure_ascii=False), call.id) for call in answer.calls
    ]
    calls += [("", unread, None) for unread in answer.invalid]
    message = AIMessageChunk(
        content=text,
        tool_call_chunks=[
            tool_call_chunk(name=name, args=args, id=id_, index=number)
            for number, (name, args, id_) in enumerate(calls)
        ],
        chunk_position="last",
        usage_metadata=_usage(info),
        response_metadata=_metadata(info, model_id),
    )
    return ChatGenerationChunk(message=message, generation_info=info)


def _metadata(info: dict[str, Any], model_id: str) -> dict[str, Any]:
    return {
        "model_name": model_id,
        "model_provider": "fused_kv",
        "finish_reason": info["finish_reason"],
        "fused_kv": info["fused_kv"],
    }


def _usage(info: dict[str, Any]) -> UsageMetadata:
    usage = info["token_usage"]
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=InputTokenDetails(cache_read=usage["prompt_tokens_details"]["cached_tokens"]),
    )
