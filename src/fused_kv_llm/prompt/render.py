"""From a prompt to the model's own text and token ids."""

from __future__ import annotations

import copy
import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from ..errors import ConfigError, PromptError
from .chat import TOOL_FIELDS, ChatPrompt, ChatTemplate, Message, Prompt, RawPrompt, checked_messages
from .encoding import Encoded, Span
from .shared_encoder import shared_encoder

__all__ = ["PromptRenderer", "Rendered"]

# Beginnings of user content that a tokenizer could merge with the end of the chat header: every ASCII
# character, and some of the rest (accents that compose, joiners, wide and right-to-left letters, emoji).
_BEGINNINGS = (
    "",
    *string.printable,
    *"éß\u0301\u200d\u00a0\u3000\ufe0f▁Ġ–“…Жאع中あ한😀",
    "\r\n",
    "\n\n",
    "  ",
    "The",
)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the text that is tokenised.

    Parameters
    ----------
    text : str
        The rendered text.
    content_spans : list of (int, int)
        Half-open character spans of the messages' contents, ascending. A content that the template drops
        or repeats has none. The whole text when no template was applied.
    add_special_tokens : bool
        Whether the tokenizer adds its own special tokens (no template was applied).
    own_control : list of (int, int) or None
        None: encode exactly as transformers does. Otherwise a content holds the text of a special token,
        and these are the spans of the control tokens that the template itself wrote.
    """

    text: str
    content_spans: list[Span]
    add_special_tokens: bool
    own_control: list[Span] | None = None


class PromptRenderer:
    """Renders prompts with the model's chat template and tokenises them once, whole; thread-safe.

    The ids are those of plain transformers: ``apply_chat_template(messages, add_generation_prompt=True)``
    for a wrapped prompt or a list of messages, ``tokenizer(prompt)`` for a raw prompt.

    There is one exception, for safety. When the content of a message (a retrieved document, say) holds the
    text of a special token, plain transformers makes that token of it, and the document can end the user's
    turn and forge others. Here such text is encoded as the ordinary characters it consists of; the rest of
    the prompt is encoded as always. The same holds for added tokens that are not special but that the
    template writes, except in assistant messages, which may carry them rightly (``<think>``). Raw prompts are
    not touched, because whoever passes one may have written their special tokens on purpose.

    Parameters
    ----------
    tokenizer : transformers fast tokenizer
        Copied; later changes to it have no effect, except to its chat template.
    wrap_chat_template : bool
        Turn a prompt string into one user message when the tokenizer has a chat template.

    Attributes
    ----------
    header_ids : list of int
        The ids before the user's content when that begins with an ordinary word, in a template that prints
        the date with a fixed one, so that they are the same tomorrow. Without wrapping, what the tokenizer
        prepends, if anything.
    prefix_ids : list of int
        The part of them with which every wrapped prompt starts, whatever its content begins with.

    Raises
    ------
    UnsupportedModelError
        If the tokenizer has no fast backend, or one that cannot be copied.
    ConfigError
        If ``wrap_chat_template`` is set and the chat template does not render a single user message.
    """

    def __init__(self, tokenizer: Any, *, wrap_chat_template: bool = True) -> None:
        self._template = ChatTemplate(tokenizer)
        self._encoder = shared_encoder(tokenizer, self._template.source)
        self._wrap = wrap_chat_template and bool(self._template)
        # Chunk KV depends on the header; with today's date in it, every stored chunk would miss tomorrow.
        undated = copy.copy(self)
        undated._template = ChatTemplate(tokenizer, fixed_date=True)
        self.header_ids, self.prefix_ids = undated._headers()

    def render(self, prompt: Prompt) -> Rendered:
        """Render a prompt.

        Parameters
        ----------
        prompt : str, sequence of mapping, ChatPrompt or RawPrompt
            A string, messages with string ``"role"`` and ``"content"``, messages and tools, or a text for which no
            template is used.

        Returns
        -------
        Rendered

        Raises
        ------
        PromptError
            If the prompt is neither, its messages cannot be rendered, or the text of a special token
            cannot be told apart from the template's own.
        """
        if isinstance(prompt, RawPrompt) or (isinstance(prompt, str) and not self._wrap):
            text = prompt if isinstance(prompt, str) else prompt.text
            if not isinstance(text, str):
                raise PromptError(f"The text of RawPrompt({text!r:.80}) is no string.")
            return Rendered(text, [(0, len(text))], add_special_tokens=True)
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        conversation = prompt if isinstance(prompt, ChatPrompt) else ChatPrompt(prompt)
        messages, tools = checked_messages(conversation.messages), conversation.tools
        for number, message in enumerate(messages):
            if self._encoder.control_spans(message["role"]):
                raise PromptError(f"The role of message {number} holds special-token text: {message['role']!r:.80}.")
            beside = json.dumps([message.get(name) for name in TOOL_FIELDS], ensure_ascii=False, default=str)
            if self._encoder.control_spans(beside, special_only=True):
                raise PromptError(f"A tool call of message {number} holds the text of a special token. Remove it.")
        text = self._template.render(messages, tools)
        located = [self._locate(messages, number, text, tools) for number in range(len(messages))]
        spans = [span for span in located if span is not None]
        lenient = [
            span
            for message, span in zip(messages, located, strict=True)
            if span is not None and message["role"] == "assistant"
        ]
        own = self._own_control(text, spans, lenient)
        return Rendered(text, sorted(spans), add_special_tokens=False, own_control=own)

    @property
    def template_source(self) -> str:
        """The chat template's source; empty where the tokenizer has none."""
        return self._template.source

    @property
    def has_tools(self) -> bool:
        """Whether the chat template has a format for tools."""
        return self._template.has_tools

    def encode(self, rendered: Rendered) -> Encoded:
        """Tokenise a rendered prompt.

        Parameters
        ----------
        rendered : Rendered
            What ``render`` returned.

        Returns
        -------
        Encoded
            Ids, and offsets into ``rendered.text``.

        Raises
        ------
        PromptError
            If the text is not valid Unicode or yields no token at all, or the tokenizer makes a special
            token of ordinary text of a message.
        """
        if rendered.own_control is None:
            encoded = self._encoder.encode(rendered.text, add_special_tokens=rendered.add_special_tokens)
        else:
            encoded = self._encoder.encode_with_control_at(rendered.text, rendered.own_control)
        if not encoded.ids:
            raise PromptError("The prompt is empty: there is nothing to answer.")
        if not rendered.add_special_tokens:
            self._encoder.require_no_special_inside(encoded, rendered.content_spans)
        return encoded

    def encode_chunk(self, text: str) -> list[int]:
        """Tokenise a chunk's text by itself.

        Parameters
        ----------
        text : str
            The text.

        Returns
        -------
        list of int
            Ids without special tokens; the text of special tokens is encoded as ordinary text.

        Raises
        ------
        PromptError
            If the text is not valid Unicode, or the tokenizer makes a special token of ordinary text.
        """
        return self._encoder.encode_plain(text)

    def _locate(
        self, messages: Sequence[Message], number: int, text: str, tools: Sequence[Mapping[str, Any]]
    ) -> Span | None:
        """Span of a message's content; refuses content with special-token text that is not found as it is."""
        content = messages[number]["content"]
        special_only = messages[number]["role"] == "assistant"
        span = self._template.locate(messages, number, text, tools)
        found = "" if span is None else text[slice(*span)]
        as_given = span is not None and found in content and found.strip() == content.strip()
        control = self._encoder.control_spans(content, special_only=special_only)
        control += self._encoder.control_spans(found, special_only=special_only)
        if control and not as_given:
            raise PromptError(
                f"The content of message {number} holds the text of a special token, and the chat template "
                "changes that content, so the two cannot be told apart. Remove the special token's text from "
                "the content."
            )
        return span

    def _own_control(self, text: str, spans: list[Span], lenient: list[Span]) -> list[Span] | None:
        """Spans of the template's own control tokens; None when no content touches a control token."""
        special = set(self._encoder.control_spans(text, special_only=True))
        every = self._encoder.control_spans(text)
        inert = [found for found in every if _touches(found, spans)]
        if all(found not in special and _touches(found, lenient) for found in inert):
            return None
        own: list[Span] = []
        position = 0
        # Between the contents, one stretch at a time: text that begins in a content must not hide one.
        for start, end in sorted([*spans, (len(text), len(text))]):
            own += [(position + a, position + b) for a, b in self._encoder.control_spans(text[position:start])]
            if (start, end) in lenient:
                own += [found for found in inert if found not in special and _touches(found, [(start, end)])]
            position = end
        return own

    def _headers(self) -> tuple[list[int], list[int]]:
        """The ids before ordinary content, and those that are the same for every beginning of the content."""
        prefixes = []
        for beginning in _BEGINNINGS:
            try:
                rendered = self.render(beginning + "Content")
            except PromptError as error:
                raise ConfigError(
                    f"wrap_chat_template=True needs a chat template that renders one user message: {error} Otherwise "
                    "set wrap_chat_template=False."
                ) from error
            if not rendered.content_spans:
                raise ConfigError(
                    "wrap_chat_template=True needs a chat template that shows the user's message once. Set "
                    "wrap_chat_template=False and render the prompt yourself."
                )
            header = rendered.content_spans[0][0] if self._wrap else 0
            encoded = self.encode(rendered)
            beyond = encoded.offsets[:, 1] > header
            count = int(beyond.argmax()) if beyond.any() else len(encoded.ids)
            prefixes.append(encoded.ids[:count])
        common = takewhile(lambda ids: len(set(ids)) == 1, zip(*prefixes, strict=False))
        # The first beginning is empty, so that the content is a plain word.
        return list(prefixes[0]), [column[0] for column in common]


def _touches(span: Span, others: Sequence[Span]) -> bool:
    return any(span[0] < end and start < span[1] for start, end in others)
