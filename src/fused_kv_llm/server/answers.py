"""Answers in OpenAI's words: whole ones, and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from fused_kv_llm.decoding import TokenLogprobs, ToolCall
from fused_kv_llm.report import FusionReport

from .answering import AnswerPart

__all__ = ["ChatAnswers", "CompletionAnswers", "Usage"]

_ASSISTANT = {"role": "assistant", "content": ""}


class Usage:
    """The tokens of a request, as its answers end."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0

    def add(self, report: FusionReport, *, same_prompt: bool) -> None:
        """Count one answer; the prompt of several answers counts once."""
        self.completion_tokens += report.completion_tokens
        if not same_prompt:
            self.prompt_tokens += report.prompt_tokens
            self.cached_tokens += report.cached_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class _Answers:
    """What both kinds of answers have.

    Parameters
    ----------
    model : str
        As the client calls it.
    tokenizer : transformers tokenizer
        Writes the tokens of probabilities.
    each : int
        Answers to one prompt.
    found : dict or None
        What reports say besides: what was retrieved.
    """

    prefix, whole, part_of = "", "", ""

    def __init__(self, model: str, tokenizer: Any, each: int, found: dict[str, Any] | None = None) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer, self._each, self._found = tokenizer, each, found or {}
        self.usage = Usage()
        self.reports: dict[int, FusionReport] = {}

    def call(self, id_: str) -> None:
        """Give the answer an id, in place of one of its own."""
        self._head["id"] = id_

    def note(self, part: AnswerPart) -> None:
        """Count an answer that has ended."""
        if part.report is not None:
            self.usage.add(part.report, same_prompt=part.index % self._each != 0)
            self.reports[part.index] = part.report

    def usage_chunk(self) -> dict[str, Any]:
        """Return the chunk that ends a stream with ``include_usage``."""
        return {**self._head, "object": self.part_of, "choices": [], "usage": self.usage.to_dict()}

    def _chunk(self, *choices: dict[str, Any], report: FusionReport | None = None) -> dict[str, Any]:
        chunk = {**self._head, "object": self.part_of, "choices": list(choices)}
        return chunk if report is None else {**chunk, "fused_kv": report.to_dict() | self._found}

    def _answer(self, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        reports = [self.reports[index].to_dict() | self._found for index in sorted(self.reports)]
        return {
            **self._head,
            "object": self.whole,
            "choices": list(choices),
            "usage": self.usage.to_dict(),
            "fused_kv": reports[0] if len(reports) == 1 else reports,
        }

    def _token(self, token_id: int) -> str:
        return str(self._tokenizer.decode([token_id]))


class ChatAnswers(_Answers):
    """Answers of ``/v1/chat/completions``."""

    prefix, whole, part_of = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def first(self, index: int) -> dict[str, Any]:
        """Return the chunk with which an answer begins."""
        return self._chunk(_choice(index, delta=dict(_ASSISTANT)))

    def chunks(self, part: AnswerPart) -> Iterable[dict[str, Any]]:
        """Yield the chunks of a part."""
        self.note(part)
        logprobs = self._logprobs(part.logprobs)
        if part.text or logprobs:
            yield self._chunk(_choice(part.index, delta={"content": part.text}, logprobs=logprobs))
        for number, call in enumerate(part.calls):
            delta = {"tool_calls": [{"index": number, **_call(call)}]}
            yield self._chunk(_choice(part.index, delta=delta))
        if part.finish_reason is not None:
            yield self._chunk(_choice(part.index, delta={}, finish_reason=part.finish_reason), report=part.report)

    def whole_answer(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Return the whole answers."""
        for part in parts:
            self.note(part)
        return self._answer(self._whole_choice(index, parts) for index in sorted(self.reports))

    def _whole_choice(self, index: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        own = [part for part in parts if part.index == index]
        text, calls = "".join(part.text for part in own), own[-1].calls
        message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logprobs = self._logprobs([one for part in own for one in part.logprobs])
        return _choice(index, message=message, logprobs=logprobs, finish_reason=own[-1].finish_reason)

    def _logprobs(self, logprobs: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if not logprobs:
            return None
        content = [
            {
                **self._written(one.token_id, one.logprob),
                "top_logprobs": [self._written(token_id, logprob) for token_id, logprob in one.top],
            }
            for one in logprobs
        ]
        return {"content": content, "refusal": None}

    def _written(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._token(token_id)
        # A token may be a part of a character, which is no text by itself.
        return {"token": token, "logprob": logprob, "bytes": None if "\ufffd" in token else list(token.encode())}


class CompletionAnswers(_Answers):
    """Answers of ``/v1/completions``."""

    prefix, whole, part_of = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, tokenizer: Any, each: int, found: dict[str, Any] | None = None) -> None:
        super().__init__(model, tokenizer, each)
        self._offsets: dict[int, int] = {}

    def chunks(self, part: AnswerPart) -> Iterable[dict[str, Any]]:
        """Yield the chunks of a part."""
        self.note(part)
        choice = _choice(part.index, text=part.text, logprobs=self._logprobs(part), finish_reason=part.finish_reason)
        yield self._chunk(choice, report=part.report)

    def whole_answer(self, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        """Return the whole answers."""
        for part in parts:
            self.note(part)
        return self._answer(self._whole_choice(index, parts) for index in sorted(self.reports))

    def _whole_choice(self, index: int, parts: Sequence[AnswerPart]) -> dict[str, Any]:
        own = [part for part in parts if part.index == index]
        every = AnswerPart(index, logprobs=[one for part in own for one in part.logprobs])
        text, reason = "".join(part.text for part in own), own[-1].finish_reason
        return _choice(index, text=text, logprobs=self._logprobs(every), finish_reason=reason)

    def _logprobs(self, part: AnswerPart) -> dict[str, Any] | None:
        if not part.logprobs:
            return None
        tokens = [self._token(one.token_id) for one in part.logprobs]
        offsets = []
        for token in tokens:
            offsets.append(self._offsets.get(part.index, 0))
            self._offsets[part.index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in part.logprobs],
            "top_logprobs": [{self._token(top): logprob for top, logprob in one.top} for one in part.logprobs],
            "text_offset": offsets,
        }


def _choice(index: int, *, finish_reason: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"index": index, "logprobs": None, **fields, "finish_reason": finish_reason}


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
