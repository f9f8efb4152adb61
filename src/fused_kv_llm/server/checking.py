"""``/v1/documents/check``: would a text be reused, and if not, why."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from .document_routes import Owned
from .state import state_of

__all__ = ["router"]

router = APIRouter()


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str = Field(min_length=1)


@router.post("/v1/documents/check")
async def check(http: Request, owner: Owned, given: _Text) -> dict[str, Any]:
    """Say whether a text would be reused in a prompt that contains it; nothing of what other tenants have is told."""
    state = state_of(http)
    state.check_open()

    def judged() -> dict[str, Any]:
        with state.tenants.using(owner.tenant, owner.apart) as engine:
            return engine.explain_text(given.text).to_dict()

    return await run_in_threadpool(judged)
