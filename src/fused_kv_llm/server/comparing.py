"""``/v1/compare`` and ``/v1/requests/{id}/measure``: a prompt in several ways, and what its full prefill takes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.prompt import Prompt, RawPrompt
from fused_kv_llm.tuning import ComparedAnswer, SideBySide, Way

from .answering import chat_prompt
from .chat import retrieved
from .guard import tenant_of
from .history_routes import trace
from .library_schema import Owner
from .messages import ChatMessage
from .requests import AskedRatio, ChatRequest, FusedKVOptions, Retrieve
from .state import state_of
from .streaming import unless_client_leaves

__all__ = ["router"]

router = APIRouter()

T = TypeVar("T")


class _Column(BaseModel):
    model_config = ConfigDict(extra="forbid")

    selector: str | None = Field(default=None, max_length=64)
    recompute_ratio: AskedRatio | None = None


class CompareRequest(BaseModel):
    """A conversation, and the ways in which its answer is wanted."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    columns: Annotated[list[_Column], Field(min_length=1, max_length=4)]
    retrieve: Retrieve | None = None
    max_tokens: int = Field(default=32, ge=1, le=128)
    """Of each answer; the distributions of all its tokens are kept meanwhile."""


class ComparedColumn(BaseModel):
    """An answer, and how far it is from full prefill's."""

    selector: str
    recompute_ratio: float
    answer: str
    ttft_s: float
    report: dict[str, Any]
    kl: float
    agreement: float
    first_difference: int | None


class Reference(BaseModel):
    """Full prefill's answer."""

    answer: str
    ttft_s: float


class Comparison(BaseModel):
    """Answers to one prompt."""

    columns: list[ComparedColumn]
    reference: Reference


class Measured(BaseModel):
    """What a full prefill took."""

    full_prefill_s: float
    prompt_tokens: int


@router.post("/v1/compare")
async def compare(http: Request, request: CompareRequest) -> Comparison:
    """Answer a conversation in up to four ways, one after the other, and compare each with full prefill."""
    state = state_of(http)
    state.check_model(request.model)
    ways = [Way(one.selector, one.recompute_ratio) for one in request.columns]

    def prompt(engine: FusedKVEngine) -> Prompt:
        options = FusedKVOptions(retrieve=request.retrieve)
        asked = ChatRequest(
            model=state.model_name, messages=request.messages, max_tokens=request.max_tokens, fused_kv=options
        )
        return chat_prompt(engine, retrieved(state, Owner(tenant_of(http), None), engine, asked)[0])

    full, columns = await _answered(http, prompt, request.max_tokens, lambda both: both.compare(ways))
    return Comparison(
        columns=[_told(column) for column in columns], reference=Reference(answer=full.text, ttft_s=full.ttft_s)
    )


@router.post("/v1/requests/{id_}/measure")
async def measure(http: Request, id_: str) -> Measured:
    """Prefill a request's prompt in full, and say how long that took."""
    text = (await run_in_threadpool(trace, http, id_))["text"]
    report = await _answered(http, lambda engine: RawPrompt(text), 1, SideBySide.full_prefill)
    return Measured(full_prefill_s=report.ttft_s, prompt_tokens=report.prompt_tokens)


async def _answered(
    http: Request, prompt: Callable[[FusedKVEngine], Prompt], max_tokens: int, ask: Callable[[SideBySide], T]
) -> T:
    state, tenant = state_of(http), tenant_of(http)
    state.check_open()
    state.quotas.admit(tenant)
    begun, left = list[SideBySide](), threading.Event()

    def answered() -> T:
        with state.comparisons.one(tenant), state.tenants.using(tenant) as engine:
            one = SideBySide(engine, prompt(engine), max_tokens, state.config.request_timeout_s)
            begun.append(one)
            if left.is_set():
                one.cancel()
            try:
                return ask(one)
            finally:
                # Also of a client that has left meanwhile.
                state.quotas.spend(tenant, one.tokens)

    try:
        return await unless_client_leaves(http, run_in_threadpool(answered))
    finally:
        left.set()
        for one in begun:
            one.cancel()


def _told(answer: ComparedAnswer) -> ComparedColumn:
    report = answer.report
    return ComparedColumn(
        selector=report.selector,
        recompute_ratio=report.recompute_ratio,
        answer=answer.text,
        ttft_s=answer.ttft_s,
        report=report.to_dict(),
        kl=answer.kl,
        agreement=answer.agreement,
        first_difference=answer.first_difference,
    )
