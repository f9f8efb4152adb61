"""LangChain messages in the form that the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, ChatMessage, HumanMessage, SystemMessage, ToolMessage

from fused_kv_llm.errors import PromptError

__all__ = ["to_engine_messages"]

# Parts of an assistant's message that repeat its tool_calls, and its reasoning.
_IGNORED_BLOCKS = {"tool_use", "tool_call", "tool_call_chunk", "invalid_tool_call", "reasoning", "thinking"}


def to_engine_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages as mappings with a role, a text, and what belongs to tool calls.

    Parameters
    ----------
    messages : sequence of BaseMessage

    Returns
    -------
    list of dict

    Raises
    ------
    PromptError
        If a message holds an image or anything else that is not text, or has no role.
    """
    return [_converted(number, message) for number, message in enumerate(messages)]


def _converted(number: int, message: BaseMessage) -> dict[str, Any]:
    content = _text(number, message)
    if isinstance(message, ToolMessage):
        named = {"name": message.name} if message.name else {}
        return {"role": "tool", "content": content, "tool_call_id": message.tool_call_id, **named}
    if isinstance(message, AIMessage):
        calls = [
            {"type": "function", "id": call["id"] or "", "function": {"name": call["name"], "arguments": call["args"]}}
            for call in message.tool_calls
        ]
        return {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
    if isinstance(message, HumanMessage):
        return {"role": "user", "content": content}
    if isinstance(message, SystemMessage):
        return {"role": "system", "content": content}
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": content}
    raise PromptError(
        f"Message {number} is a {type(message).__name__}, which has no role in a chat template. Use a system, human, "
        "AI or tool message."
    )


def _text(number: int, message: BaseMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = []
    for block in message.content:
        if isinstance(block, str):
            parts.append(block)
        elif block.get("type") == "text":
            parts.append(str(block["text"]))
        elif block.get("type") not in _IGNORED_BLOCKS or not isinstance(message, AIMessage):
            raise PromptError(
                f"Message {number} holds a content part of type {block.get('type')!r}: this model reads text only. "
                "Describe the content in words, or use a multi-modal model."
            )
    return "".join(parts)
