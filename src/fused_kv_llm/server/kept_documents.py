"""``/v1/documents/ID/...``: how a document's KV is kept: warm, pinned, stored again."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from .document_routes import Owned, found_document, told
from .document_schemas import DocumentObject, StartedDocument, WarmedDocument
from .refusals import RefusedError
from .schemas import answers_with
from .state import state_of

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/documents/{id_}/pin", responses=answers_with(DocumentObject))
async def pin(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Keep the KV of a document's chunks from being evicted; it can be deleted, and expire, all the same."""

    def pinned() -> dict[str, Any]:
        with state_of(http).documents.open(owner) as opened:
            found = found_document(opened, id_)
            if not found.ready:
                raise RefusedError("The document is not ingested yet: wait for its job, or resume it", 409)
            state_of(http).documents.pins.pin(opened.engine, owner, opened.library, id_)
            return told(opened, found)

    return await run_in_threadpool(pinned)


@router.post("/v1/documents/{id_}/unpin", responses=answers_with(DocumentObject))
async def unpin(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Let a document's KV be evicted again, unless another document that has it too is pinned."""

    def unpinned() -> dict[str, Any]:
        with state_of(http).documents.open(owner) as opened:
            found = found_document(opened, id_)
            state_of(http).documents.pins.unpin(opened.engine, id_)
            return told(opened, found)

    return await run_in_threadpool(unpinned)


@router.post("/v1/documents/{id_}/warm", responses=answers_with(WarmedDocument))
async def warm(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Begin to load the KV of a document's chunks into memory."""

    def warmed() -> dict[str, Any]:
        with state_of(http).documents.open(owner) as opened:
            found_document(opened, id_)
            keys = opened.engine.prefetch(chunk.text for chunk in opened.library.chunks(id_))
            return {"id": id_, "loading": sum(key is not None for key in keys), "not_stored": keys.count(None)}

    return await run_in_threadpool(warmed)


@router.post("/v1/documents/{id_}/refresh", status_code=202, responses=answers_with(StartedDocument, 202))
async def refresh(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Store again, by a job, what KV of a document was evicted or damaged, or belonged to another model."""
    state = state_of(http)
    state.check_open()
    state.documents.jobs.check_room(owner)
    await run_in_threadpool(state.documents.check_bytes, owner)

    def begun() -> dict[str, Any]:
        with state.documents.open(owner) as opened:
            found = found_document(opened, id_)
            if not found.ready or opened.library.has_open_jobs(id_):
                raise RefusedError("The document is not ingested yet: wait for its job, or resume it", 409)
            job = opened.library.add_job(id_)
            state.documents.jobs.start(owner, job, id_)
            return {**told(opened, found), "job_id": job}

    return await run_in_threadpool(begun)
