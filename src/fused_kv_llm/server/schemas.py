"""What routes answer, for the schema: ``/openapi.json`` says it, and typed clients are generated from it.

Answers are not checked against these models as they are given: the fuzzing of the routes does that.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from .library_schema import JobState

__all__ = [
    "EVENTS", "ChatCompletion", "Completion", "JobObject", "JobPage", "ModelCard", "ModelList", "TokenIds", "Version",
    "answers_with", "streams_too",
]  # fmt: skip

EVENTS: dict[str, Any] = {"text/event-stream": {}}
"""The content of a stream of events."""


class Version(BaseModel):
    """The version of this software."""

    version: str


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    """All models: one."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenIds(BaseModel):
    """The ids of a text."""

    count: int
    max_model_len: int
    tokens: list[int]


class JobObject(BaseModel):
    """How far the ingestion of a document is."""

    id: str
    object: Literal["job"]
    document_id: str
    state: JobState
    done: int
    total: int
    error: str | None
    created_at: int
    changed_at: float


class JobPage(BaseModel):
    """A page of jobs."""

    object: Literal["list"]
    data: list[JobObject]
    has_more: bool
    last_id: str | None


class _PromptTokensDetails(BaseModel):
    cached_tokens: int


class _Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: _PromptTokensDetails


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: _Usage
    fused_kv: dict[str, Any] | list[dict[str, Any]]


class _CalledFunction(BaseModel):
    name: str
    arguments: str


class _ToolCall(BaseModel):
    id: str
    type: Literal["function"]
    function: _CalledFunction


class _Message(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[_ToolCall] | None = None


class _ChatChoice(BaseModel):
    index: int
    message: _Message
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(_Answer):
    """The answers to a conversation."""

    object: Literal["chat.completion"]
    choices: list[_ChatChoice]


class _CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]


class Completion(_Answer):
    """What texts are gone on with."""

    object: Literal["text_completion"]
    choices: list[_CompletionChoice]


def answers_with(model: type[BaseModel], status: int = 200) -> dict[int | str, dict[str, Any]]:
    """Return the entry of a route that answers with a model."""
    return {status: {"model": model}}


def streams_too(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Return the entry of a route that answers with a model, or with events where a stream is asked for."""
    return {200: {"model": model, "content": EVENTS}}
