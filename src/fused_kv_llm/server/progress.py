"""``/v1/requests/{id_}/progress``: whether a request that has no answer yet waits, and behind how many."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Request
from pydantic import BaseModel

from .guard import tenant_of
from .state import state_of

__all__ = ["router"]

router = APIRouter()


class Progress(BaseModel):
    """How far an open request is."""

    object: Literal["request.progress"] = "request.progress"
    state: Literal["waiting", "begun", "closed"]
    """``closed`` also where no request of that name is known."""
    ahead: int | None = None
    """Requests that wait and came before; of the same tenant only, where there are keys. Tenants take turns, and a
    prompt of which more is at hand may go before one that came earlier. None until it is in the queue, and afterwards.
    """


@router.get("/v1/requests/{id_}/progress")
async def progress(http: Request, id_: str) -> Progress:
    """Say how far a request is, by the name that its client gave it in ``X-Request-Id``."""
    state = state_of(http)
    recording = state.recorder.under_way(tenant_of(http), id_)
    if recording is None:
        return Progress(state="closed")
    if not recording.handles:
        # Its chunks are being searched.
        return Progress(state="waiting")
    runner = state.tenants.default.requests
    ahead = runner.ahead_of(recording.handles[0], of_all=not state.config.api_keys)
    return Progress(state="begun" if ahead is None else "waiting", ahead=ahead)
