"""LlamaIndex messages in the form that the engine takes."""

from __future__ import annotations

from collections.abc import Sequence

from llama_index.core.base.llms.types import ChatMessage, TextBlock

from fused_kv_llm.errors import PromptError

__all__ = ["to_engine_messages"]


def to_engine_messages(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    """Return messages as mappings with a role and a text.

    Parameters
    ----------
    messages : sequence of ChatMessage

    Returns
    -------
    list of dict

    Raises
    ------
    PromptError
        If a message holds anything but text.
    """
    return [{"role": str(message.role.value), "content": _text(n, message)} for n, message in enumerate(messages)]


def _text(number: int, message: ChatMessage) -> str:
    for block in message.blocks:
        if not isinstance(block, TextBlock):
            raise PromptError(
                f"Message {number} holds a {type(block).__name__}: this model reads text only. Describe the content "
                "in words, or use a multi-modal LLM."
            )
    return message.content or ""
