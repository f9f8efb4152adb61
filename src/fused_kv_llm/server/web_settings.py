"""``/v1/ui``: what the web UI has to know of its server before it can ask anything."""

from __future__ import annotations

from importlib import metadata
from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from fused_kv_llm.selectors import SELECTORS

from .reading import UPLOAD_SUFFIXES
from .state import state_of

__all__ = ["WebSettings", "router"]

router = APIRouter()


class WebSettings(BaseModel):
    """What is served, with which defaults, and what may be chosen instead."""

    version: str
    model: str
    context_length: int
    recompute_ratio: float | Literal["auto", "adaptive"]
    selector: str
    selectors: list[str]
    max_answer_tokens: int
    upload_types: list[str]
    max_upload_bytes: int
    questions: list[str]
    paths: list[str]


@router.get("/v1/ui")
def web_settings(http: Request) -> WebSettings:
    """Say what the web UI offers."""
    state = state_of(http)
    engine = state.tenants.default
    selector = engine.config.selector
    return WebSettings(
        version=metadata.version("fused-kv-llm"),
        model=state.model_name,
        context_length=engine.context_length,
        recompute_ratio=engine.config.recompute_ratio,
        selector=selector if isinstance(selector, str) else selector.name,
        selectors=list(SELECTORS),
        max_answer_tokens=state.config.max_answer_tokens,
        upload_types=list(UPLOAD_SUFFIXES),
        max_upload_bytes=state.config.max_body_bytes,
        questions=list(state.config.questions),
        paths=list(http.app.openapi()["paths"]),
    )
