"""The chat template: messages to text, and where each message's content stands in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import PromptError
from .encoding import Span

__all__ = ["TOOL_FIELDS", "ChatPrompt", "ChatTemplate", "Message", "Prompt", "RawPrompt", "checked_messages"]

Message = Mapping[str, Any]

TOOL_FIELDS = {"tool_calls": list, "tool_call_id": str, "name": str}

_FIXED_DATE = "{% macro strftime_now(format) %}01 Jan 2025{% endmacro %}"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation in which the model may call tools.

    Parameters
    ----------
    messages : sequence of mapping
        With ``"role"`` and ``"content"``; where the chat template shows them also ``"tool_calls"``,
        ``"tool_call_id"`` and ``"name"``.
    tools : sequence of mapping
        Function descriptions as the template expects them, commonly OpenAI's JSON schema.
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A text that the model goes on with, without a chat template.

    Parameters
    ----------
    text : str
        May hold special tokens; the tokenizer adds those that it puts before every text.
    """

    text: str


Prompt = str | Sequence[Message] | ChatPrompt | RawPrompt
"""What can be asked: a string, a user's message; messages; messages and tools; or the model's own text."""


class ChatTemplate:
    """A tokenizer's chat template; thread-safe.

    Parameters
    ----------
    tokenizer : transformers tokenizer
        Only read.
    fixed_date : bool
        Let a template that prints today's date print a fixed one.
    """

    def __init__(self, tokenizer: Any, *, fixed_date: bool = False) -> None:
        self._tokenizer = tokenizer
        template = getattr(tokenizer, "chat_template", None) or ""
        self.source: str = "\n".join(template.values()) if isinstance(template, dict) else template
        # A macro hides the function of the same name that transformers gives to templates.
        dated = fixed_date and isinstance(template, str) and "strftime_now" in template
        self._options = {"chat_template": _FIXED_DATE + template} if dated else {}

    def __bool__(self) -> bool:
        """Whether the tokenizer has a template."""
        return bool(self.source)

    @property
    def has_tools(self) -> bool:
        """Whether the template shows the tools that a model may call."""
        return "tools" in self.source

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Render messages with the generation prompt, as ``apply_chat_template(tokenize=False)``.

        Raises
        ------
        PromptError
            If there is no template, or it refuses the messages.
        """
        if not self:
            raise PromptError(
                "Chat messages need a chat template and this tokenizer has none. Pass the prompt as one "
                "string, or set tokenizer.chat_template."
            )
        self._require_tool_format(messages, tools)
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **self._options,
            )
        except Exception as error:  # a template is third-party code and may raise anything
            roles = [message["role"] for message in messages]
            raise PromptError(
                f"The model's chat template refused messages with the roles {roles}: {error}. Change the "
                "messages, or render the prompt yourself and pass it as a string with wrap_chat_template=False."
            ) from error
        return str(text)

    def _require_tool_format(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        calling = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
        if (tools and not self.has_tools) or (calling and "tool" not in self.source):
            raise PromptError(
                "The model's chat template has no format for tools, so tool calls and tool messages would be "
                "dropped or misread. Use a model whose template has one, or describe the tools and their results "
                "in ordinary messages."
            )

    def locate(
        self, messages: Sequence[Message], index: int, text: str, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Span | None:
        """Find where a message's content stands in the rendered text.

        The messages are rendered once more with a marker in the content's place; what stands before and
        after the marker must be the beginning and the end of the text. What lies between is the content,
        possibly trimmed or rewritten by the template.

        Parameters
        ----------
        messages : sequence of mapping
            The messages.
        index : int
            Which message.
        text : str
            What ``render(messages, tools)`` returned.
        tools : sequence of mapping
            The tools.

        Returns
        -------
        (int, int) or None
            Half-open character span; None when the template drops or repeats the content, or renders
            something else around another one.
        """
        marker = "contentmarker"
        while marker in text:
            marker += "x"
        probe = [*messages]
        probe[index] = {**messages[index], "content": marker}
        try:
            before, *rest = self.render(probe, tools).split(marker)
        except PromptError:
            return None
        if len(rest) != 1:
            return None
        after = rest[0]
        start, end = len(before), len(text) - len(after)
        if start > end or not text.startswith(before) or not text.endswith(after):
            return None
        return start, end


def checked_messages(prompt: Any) -> list[Message]:
    """Check that a prompt is a list of messages with a role and a text.

    Raises
    ------
    PromptError
        If it is not.
    """
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes) or not prompt:
        raise PromptError(
            f"Expected a string or a non-empty list of messages, got {type(prompt).__name__}: {prompt!r:.80}."
        )
    for number, message in enumerate(prompt):
        if not isinstance(message, Mapping) or not {"role", "content"} <= message.keys():
            raise PromptError(f"Message {number} must be a mapping with 'role' and 'content', got {message!r:.80}.")
        extra = sorted(str(name) for name in message.keys() - {"role", "content", *TOOL_FIELDS})
        if extra:
            raise PromptError(
                f"Message {number} has the fields {extra}; only 'role', 'content' and those of tool calls are "
                "supported. Put what they say into the content."
            )
        for name, kind in TOOL_FIELDS.items():
            if name in message and not isinstance(message[name], kind):
                raise PromptError(
                    f"The {name} of message {number} must be a {kind.__name__}, got {type(message[name]).__name__}."
                )
        for name in ("role", "content"):
            if not isinstance(message[name], str):
                raise PromptError(
                    f"The {name} of message {number} must be a string, got {type(message[name]).__name__}. "
                    "Join the text parts; images are not supported."
                )
    return list(prompt)
