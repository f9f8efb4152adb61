"""What is served, whether it is well, and how texts are tokenised."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.prompt import ChatPrompt, RawPrompt

from .messages import engine_messages
from .refusals import RefusedError
from .requests import TokenizeRequest
from .schemas import ModelCard, ModelList, TokenIds, Version, answers_with
from .state import ServerState, state_of

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models", responses=answers_with(ModelList))
async def models(http: Request) -> dict[str, Any]:
    """List what is served: one model."""
    return {"object": "list", "data": [_model(state_of(http))]}


@router.get("/v1/models/{name:path}", responses=answers_with(ModelCard))
async def model(http: Request, name: str) -> dict[str, Any]:
    """Describe the model."""
    state = state_of(http)
    state.check_model(name)
    return _model(state)


@router.head("/health", include_in_schema=False)
@router.get("/health", response_class=Response)
async def health() -> Response:
    """Say that the process answers."""
    return Response()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_class=Response)
async def ready(http: Request) -> Response:
    """Say whether requests are taken."""
    state_of(http).check_open()
    return Response()


@router.get("/version", responses=answers_with(Version))
async def version() -> dict[str, str]:
    """Return the version of this software."""
    return {"version": metadata.version("fused-kv-llm")}


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Return counters and times for Prometheus."""
    state = state_of(http)
    return Response(state.metrics.text(*state.tenants.default.requests.open), media_type=CONTENT_TYPE_LATEST)


@router.post("/tokenize", responses=answers_with(TokenIds))
async def tokenize(http: Request, request: TokenizeRequest) -> dict[str, Any]:
    """Return the ids of a text or a conversation."""
    state = state_of(http)
    state.check_model(request.model)
    engine = state.tenants.default
    ids = await run_in_threadpool(_ids, engine, request)
    return {"count": len(ids), "max_model_len": engine.context_length, "tokens": ids}


def _ids(engine: FusedKVEngine, request: TokenizeRequest) -> list[int]:
    if request.messages is not None:
        return engine.encode(ChatPrompt(engine_messages(request.messages)))
    if not request.prompt:
        raise RefusedError("prompt is empty", param="prompt")
    return engine.encode(RawPrompt(request.prompt))


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.created_s,
        "owned_by": "fused-kv-llm",
        "max_model_len": state.tenants.default.context_length,
    }
