"""``/v1/jobs``: how far the ingestion of documents is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from .document_routes import After, Limit, Owned, page
from .library import Library
from .library_schema import Job
from .refusals import RefusedError
from .schemas import EVENTS, JobObject, JobPage, answers_with
from .state import state_of
from .streaming import EventResponse

__all__ = ["router"]

router = APIRouter()

_POLL_S = 0.1


@router.get("/v1/jobs", responses=answers_with(JobPage))
def jobs(http: Request, owner: Owned, limit: Limit = 20, after: After = None) -> dict[str, Any]:
    """List jobs, the oldest first."""
    with state_of(http).documents.open(owner) as opened:
        return page(opened.library.jobs(limit + 1, after), limit)


@router.get("/v1/jobs/{id_}", responses=answers_with(JobObject))
def job(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Say how far a job is."""
    with state_of(http).documents.open(owner) as opened:
        return _found(opened.library, id_).to_dict()


@router.get("/v1/jobs/{id_}/events", response_class=StreamingResponse, responses={200: {"content": EVENTS}})
def events(http: Request, owner: Owned, id_: str) -> EventResponse:
    """Tell every step of a job as it comes, until it has ended."""
    with ExitStack() as entered:
        opened = entered.enter_context(state_of(http).documents.open(owner))
        first = _found(opened.library, id_)
        until_told = AsyncExitStack()
        until_told.callback(entered.pop_all().close)
    return EventResponse(_steps(http, opened.library, first), until_told)


@router.post("/v1/jobs/{id_}/cancel", responses=answers_with(JobObject))
def cancel(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Give up a job at its next step."""
    desk = state_of(http).documents
    with desk.open(owner) as opened:
        found = _found(opened.library, id_)
        if not desk.jobs.cancel(opened.library, id_):
            raise RefusedError(f"The job has ended already: {found.state}", 409, code="job_ended")
        return _found(opened.library, id_).to_dict()


@router.post("/v1/jobs/{id_}/resume", status_code=202, responses=answers_with(JobObject, 202))
async def resume(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Go on with a job that has failed, or was cancelled or interrupted."""
    state = state_of(http)
    state.check_open()

    def resumed() -> dict[str, Any]:
        with state.documents.open(owner) as opened:
            found = _found(opened.library, id_)
            if opened.library.document(found.document) is None:
                raise RefusedError("The document of this job has been deleted", 409, code="document_deleted")
            if not state.documents.jobs.resume(opened.library, owner, id_, found.document):
                raise RefusedError(f"There is nothing to resume: {found.state}", 409, code="job_not_resumable")
            return _found(opened.library, id_).to_dict()

    return await run_in_threadpool(resumed)


async def _steps(http: Request, library: Library, first: Job) -> AsyncGenerator[dict[str, Any]]:
    current: Job | None = first
    told: Job | None = None
    while current is not None:
        if current != told:
            yield current.to_dict()
            told = current
        if current.ended or state_of(http).draining:
            return
        await asyncio.sleep(_POLL_S)
        current = library.job(first.id)


def _found(library: Library, id_: str) -> Job:
    found = library.job(id_)
    if found is None:
        raise RefusedError(f"There is no job {id_!r:.80}", 404, code="not_found")
    return found
