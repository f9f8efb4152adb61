"""Messages as OpenAI's clients send them, and as the engine takes them."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from .refusals import RefusedError

__all__ = ["ChatMessage", "ToolCallOfMessage", "engine_messages"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TextPart(_Strict):
    """A part of a content; this model reads text only."""

    type: Literal["text"]
    text: str


class CalledFunction(_Strict):
    """A function that was called, its arguments as JSON."""

    name: str
    arguments: str = "{}"


class ToolCallOfMessage(_Strict):
    """A call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(_Strict):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallOfMessage] | None = None
    tool_call_id: str | None = None
    refusal: None = Field(default=None, description="Accepted as null, as OpenAI's own answers have it.")
    audio: None = None
    function_call: None = None
    annotations: list[None] | None = None

    @property
    def text(self) -> str:
        """The content; empty where there is none."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


def engine_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages with a role, a text and what belongs to tool calls.

    Parameters
    ----------
    messages : list of ChatMessage

    Returns
    -------
    list of dict

    Raises
    ------
    RefusedError
        If the arguments of a call are no JSON object, or a message has no content where it needs one.
    """
    return [_converted(number, message) for number, message in enumerate(messages)]


def _converted(number: int, message: ChatMessage) -> dict[str, Any]:
    if message.content is None and not message.tool_calls:
        raise RefusedError(f"messages.{number}.content is missing", param=f"messages.{number}.content")
    # OpenAI's newer name for the system's role, which chat templates do not know.
    role = "system" if message.role == "developer" else message.role
    converted: dict[str, Any] = {"role": role, "content": message.text}
    if message.tool_calls and role == "assistant":
        converted["tool_calls"] = [_call(number, call) for call in message.tool_calls]
    if role == "tool":
        converted["tool_call_id"] = message.tool_call_id or ""
        if message.name:
            converted["name"] = message.name
    return converted


def _call(number: int, call: ToolCallOfMessage) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        # Nested too deep is no object either that a template could show.
        arguments = None
    if not isinstance(arguments, dict):
        raise RefusedError(
            f"The arguments of {call.function.name!r} in message {number} are no JSON object: "
            f"{call.function.arguments!r:.80}",
            param=f"messages.{number}.tool_calls",
        )
    return {"type": "function", "id": call.id, "function": {"name": call.function.name, "arguments": arguments}}
