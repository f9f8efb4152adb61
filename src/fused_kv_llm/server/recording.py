"""From a request and what became of it to what is kept of it; and what is kept where texts are not."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fused_kv_llm.report import FusionReport
from fused_kv_llm.serving import RequestHandle

from .answering import AnswerPart
from .history_schema import RequestRecord, RequestStatus
from .refusals import RefusedError, known_refusal
from .requests import ChatRequest, CompletionRequest
from .retrieval import RetrievedChunk
from .streaming import CLIENT_LEFT

__all__ = ["Recording", "counts_only"]

_QUESTION_CHARS = 200
_MESSAGE_CHARS = 2000
# Strings of a report that say nothing of a text.
_NAMES = frozenset({"selector", "speculation", "not_shared", "stage", "outcome"})
_OPTIONS = ("max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "n")


class Recording:
    """One request while it is answered.

    Parameters
    ----------
    request : ChatRequest or CompletionRequest or None
        None if its body made no sense.
    endpoint, request_id, tenant : str
        Path, name in ``X-Request-Id``, and whose it is.
    body_bytes : int
        Size of its body.

    Attributes
    ----------
    id : str
        Of the answer, and of what is kept; nobody can guess it.
    found : list of RetrievedChunk
        What was retrieved for it.
    handles : list of RequestHandle
        Of its answers, once they were submitted.
    reports : dict of int to FusionReport
        Of the answers that came to their end; when the request has ended, of all that had begun.
    """

    def __init__(
        self,
        request: ChatRequest | CompletionRequest | None,
        endpoint: str,
        request_id: str,
        tenant: str,
        body_bytes: int,
    ) -> None:
        prefix = "cmpl" if endpoint == "/v1/completions" else "chatcmpl"
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self.found: list[RetrievedChunk] = []
        self.handles: list[RequestHandle] = []
        self.reports: dict[int, FusionReport] = {}
        self._request, self._endpoint, self._name, self.tenant = request, endpoint, request_id, tenant
        self._body_bytes = body_bytes
        self._created_s, self._started_s = time.time(), time.perf_counter()
        self._wanted, self._is_complete, self._text = 1, False, list[str]()
        self._calls: list[dict[str, Any]] = []
        self._error: BaseException | None = None
        self._latency_s = 0.0

    async def watched(self, parts: AsyncGenerator[AnswerPart], answers: int) -> AsyncGenerator[AnswerPart]:
        """Pass on the parts of so many answers, and note them."""
        self._wanted = answers
        async with aclosing(parts):
            try:
                async for part in parts:
                    self._note(part)
                    yield part
            except Exception as error:
                # A stream tells its client, and nobody else.
                self._error = error
                raise

    def end(self, error: BaseException | None) -> None:
        """Note that the request has ended, and with what."""
        self._latency_s = time.perf_counter() - self._started_s
        self._error = self._error or error
        self._is_complete = len(self.reports) == self._wanted
        for index, handle in enumerate(self.handles):
            # The engine may not have noticed yet that nobody wants the answer any more.
            if index not in self.reports and handle.report.prompt_tokens:
                self.reports[index] = replace(handle.report)

    @property
    def status(self) -> RequestStatus:
        """What became of the request."""
        refusal = self._refusal()
        if refusal is None:
            return "ok" if self._is_complete else "cancelled"
        if refusal.status == CLIENT_LEFT:
            return "cancelled"
        return "refused" if refusal.status < 500 or refusal.status in (501, 503) else "failed"

    @property
    def prompts(self) -> list[FusionReport]:
        """A report for each prompt that was computed; several answers have one prompt."""
        each = 1 if self._request is None else self._request.n or 1
        return [report for index, report in sorted(self.reports.items()) if index % each == 0]

    @property
    def completion_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(report.completion_tokens for report in self.reports.values())

    @property
    def verdicts(self) -> dict[str, int]:
        """Chunks by what became of them."""
        return dict(Counter(one.outcome.value for report in self.prompts for one in report.verdicts))

    def record(self, *, texts: bool, saved_s: float | None) -> RequestRecord:
        """Return what is kept, with texts or without; another thread may ask for it when the request has ended."""
        request, prompts = self._request, self.prompts
        record = RequestRecord(
            self.id, self._name, self.tenant, self._created_s, self._endpoint, status=self.status,
            http_status=self._http_status, error=self._told(texts), latency_s=self._latency_s, saved_s=saved_s,
            verdicts=self.verdicts,
        )  # fmt: skip
        if request is not None:
            record.stream = bool(request.stream)
            # What was refused may have any text in the place of a name.
            if texts or record.status != "refused":
                record.model, record.selector = request.model, request.fused_kv.selector
        if prompts:
            first = prompts[0]
            record.selector, record.recompute_ratio, record.ttft_s = first.selector, first.recompute_ratio, first.ttft_s
            record.completion_tokens = self.completion_tokens
            for name in ("prompt_tokens", "prefix_tokens", "reused_tokens", "recomputed_tokens", "fresh_tokens"):
                setattr(record, name, sum(getattr(report, name) for report in prompts))
            if texts and first.trace is not None:
                record.trace = first.trace.to_dict()
        if texts and request is not None:
            record.question = _question(request)
        record.detail = self._detail(texts)
        return record

    @property
    def nbytes(self) -> int:
        """About how much memory it takes until it is kept."""
        reports = 100 * sum(report.prompt_tokens for report in self.prompts)
        return self._body_bytes + sum(map(len, self._text)) + reports

    # -- inside ----------------------------------------------------------------------------------------------

    def _note(self, part: AnswerPart) -> None:
        if part.index == 0:
            self._text.append(part.text)
            self._calls += [{"name": call.name, "arguments": call.arguments} for call in part.calls]
        if part.report is not None:
            self.reports[part.index] = part.report

    def _refusal(self) -> RefusedError | None:
        if isinstance(self._error, (asyncio.CancelledError, GeneratorExit)):
            return RefusedError("The client has left", CLIENT_LEFT)
        return None if self._error is None else known_refusal(self._error)

    @property
    def _http_status(self) -> int:
        refusal = self._refusal()
        if refusal is not None:
            return refusal.status
        return CLIENT_LEFT if self.status == "cancelled" else 200

    def _told(self, texts: bool) -> dict[str, Any] | None:
        refusal = self._refusal()
        if refusal is None or self.status == "cancelled":
            return None
        message = refusal.message[:_MESSAGE_CHARS] if texts else None
        return {"type": refusal.kind, "code": refusal.code, "message": message}

    def _detail(self, texts: bool) -> dict[str, Any]:
        report = self.prompts[0].to_dict() if self.prompts else None
        request, dumped = self._request, {}
        if request is not None:
            dumped = request.model_dump(mode="json", exclude_unset=True, exclude={"model", "stream"})
        detail: dict[str, Any] = dict.fromkeys(("answer", "messages", "prompt", "chunks", "tool_calls"))
        detail |= {"detail_available": texts, "choices": len(self.reports)}
        if not texts:
            options = {name: dumped[name] for name in _OPTIONS if name in dumped}
            return detail | {"report": None if report is None else counts_only(report), "options": options}
        detail |= {"messages": dumped.pop("messages", None), "prompt": dumped.pop("prompt", None)}
        detail |= {"report": report, "options": dumped, "answer": "".join(self._text), "tool_calls": self._calls}
        chunks = [{"text": chunk.text, "source": chunk.source, **chunk.to_dict()} for chunk in self.found]
        return detail | {"chunks": chunks}


def counts_only(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report without what was asked: numbers, and names of stages, selectors and outcomes.

    What is not known to be harmless is left out, so that a new field of the report tells nothing by accident.
    """
    kept = {name: _counted(name, value) for name, value in report.items()}
    return {name: value for name, value in kept.items() if value is not None}


def _counted(name: str, value: Any) -> Any:
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and name in _NAMES):
        return value
    if isinstance(value, Mapping):
        return counts_only(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [counts_only(one) for one in value if isinstance(one, Mapping)]
    return None


def _question(request: ChatRequest | CompletionRequest) -> str:
    if isinstance(request, CompletionRequest):
        return (request.prompt if isinstance(request.prompt, str) else request.prompt[0])[:_QUESTION_CHARS]
    users = [message.text for message in request.messages if message.role == "user"]
    return users[-1][:_QUESTION_CHARS] if users else ""
