"""``/v1/chat/completions`` and ``/v1/completions``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool

from fused_kv_llm.engine import FusedKVEngine

from .answering import AnswerPart, Choice, interleaved, submit_chat, submit_completion
from .answers import ChatAnswers, CompletionAnswers
from .guard import tenant_of
from .library_schema import Owner
from .recording import Recording
from .requests import ChatRequest, CompletionRequest
from .retrieval import RetrievedChunk
from .schemas import ChatCompletion, Completion, streams_too
from .state import ServerState, state_of
from .streaming import EventResponse, unless_client_leaves

__all__ = ["retrieved", "router"]

router = APIRouter()

Answers = ChatAnswers | CompletionAnswers
Submit = Callable[[FusedKVEngine, Recording], Sequence[Choice]]


@router.post("/v1/chat/completions", response_model=None, responses=streams_too(ChatCompletion))
async def chat(http: Request, request: ChatRequest) -> Response | dict[str, Any]:
    """Answer a conversation."""
    state = state_of(http)
    found: list[RetrievedChunk] = []

    def submit(engine: FusedKVEngine, recording: Recording) -> Sequence[Choice]:
        asked, chunks = retrieved(state, Owner(tenant_of(http), request.fused_kv.tenant), engine, request)
        found.extend(chunks)
        recording.found = found
        return submit_chat(engine, asked, state.config)

    return await _respond(
        http,
        request,
        submit,
        lambda engine: ChatAnswers(request.model, engine.tokenizer, request.n or 1, _told(request, found)),
    )


@router.post("/v1/completions", response_model=None, responses=streams_too(Completion))
async def complete(http: Request, request: CompletionRequest) -> Response | dict[str, Any]:
    """Go on with texts."""
    state = state_of(http)
    return await _respond(
        http,
        request,
        lambda engine, _: submit_completion(engine, request, state.config),
        lambda engine: CompletionAnswers(request.model, engine.tokenizer, request.n or 1),
    )


def retrieved(
    state: ServerState, owner: Owner, engine: FusedKVEngine, request: ChatRequest
) -> tuple[ChatRequest, list[RetrievedChunk]]:
    """Return a conversation with what was retrieved for it, if that is wanted."""
    wanted, desk = request.fused_kv.retrieve, state.documents
    if wanted is None:
        return request, []
    most = request.max_completion_tokens or request.max_tokens or state.config.max_answer_tokens
    with desk.libraries.using(engine, owner) as library:
        messages, found = desk.retrieval.prompt(engine, library, request.messages, wanted.k, most)
    expected = [*(request.fused_kv.expected or ()), *(chunk.text for chunk in found)]
    options = request.fused_kv.model_copy(update={"expected": expected})
    return request.model_copy(update={"messages": messages, "fused_kv": options}), found


def _told(request: ChatRequest, found: Sequence[RetrievedChunk]) -> dict[str, Any]:
    return {} if request.fused_kv.retrieve is None else {"retrieved": [chunk.to_dict() for chunk in found]}


async def _respond(
    http: Request,
    request: ChatRequest | CompletionRequest,
    submit: Submit,
    answers_of: Callable[[FusedKVEngine], Answers],
) -> Response | dict[str, Any]:
    state = state_of(http)
    tenant, asked_s = tenant_of(http), asyncio.get_running_loop().time()
    async with AsyncExitStack() as entered:
        recording = entered.enter_context(state.recorder.request(http, request))
        state.check_open()
        state.check_model(request.model)
        state.quotas.admit(tenant)
        entered.enter_context(state.metrics.request())
        using = state.tenants.using(tenant, request.fused_kv.tenant)
        # Opening a tenant's engine, and closing another's, takes long enough to hold up everybody's streams.
        engine = await run_in_threadpool(using.__enter__)
        entered.push(using.__exit__)
        choices = await run_in_threadpool(submit, engine, recording)
        recording.handles = [choice.handle for choice in choices]
        entered.callback(_leave, state, tenant, choices)
        if state.padding.is_on:
            await run_in_threadpool(_pad, state, engine, choices, asked_s)
        parts = recording.watched(_counted(state, interleaved(choices)), len(choices))
        entered.push_async_callback(parts.aclose)
        answers = answers_of(engine)
        answers.call(recording.id)
        if not request.stream:
            return answers.whole_answer(await unless_client_leaves(http, _collected(parts)))
        # What is refused before the first token has a status of its own.
        first = await unless_client_leaves(http, anext(parts))
        usage = request.stream_options is not None and request.stream_options.include_usage
        return EventResponse(_chunks(answers, choices, first, parts, usage=usage), entered.pop_all())


def _leave(state: ServerState, tenant: str, choices: Sequence[Choice]) -> None:
    """End the answers, which may never have been begun to be taken, and count what was computed of them."""
    for choice in choices:
        choice.handle.cancel()
        state.quotas.spend(tenant, choice.handle.report.prompt_tokens + choice.handle.report.completion_tokens)


def _pad(state: ServerState, engine: FusedKVEngine, choices: Sequence[Choice], asked_s: float) -> None:
    """Say when answers may begin."""
    tokens: dict[int, int] = {}
    for choice in choices:
        # Several answers have one prompt.
        if id(choice.prompt) not in tokens:
            tokens[id(choice.prompt)] = len(engine.encode(choice.prompt))
        period_s = state.padding.period_s(tokens[id(choice.prompt)])
        if period_s is not None:
            choice.begins = asked_s, period_s


async def _counted(state: ServerState, parts: AsyncGenerator[AnswerPart]) -> AsyncGenerator[AnswerPart]:
    async with aclosing(parts):
        async for part in parts:
            if part.report is not None:
                state.metrics.answered(part.report, part.finish_reason or "stop")
            yield part


async def _collected(parts: AsyncGenerator[AnswerPart]) -> list[AnswerPart]:
    return [part async for part in parts]


async def _chunks(
    answers: Answers, choices: Sequence[Choice], first: AnswerPart, parts: AsyncGenerator[AnswerPart], *, usage: bool
) -> AsyncGenerator[dict[str, Any]]:
    def told(chunk: dict[str, Any]) -> dict[str, Any]:
        # With include_usage every chunk has the field, and the last one the numbers.
        return {**chunk, "usage": None} if usage else chunk

    if isinstance(answers, ChatAnswers):
        for choice in choices:
            yield told(answers.first(choice.index))
    for chunk in answers.chunks(first):
        yield told(chunk)
    async for part in parts:
        for chunk in answers.chunks(part):
            yield told(chunk)
    if usage:
        yield answers.usage_chunk()
