"""``/v1/documents``: upload, list, read and delete documents; all of one tenant."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Annotated, Any, NamedTuple, TypeVar

from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile

from fused_kv_llm.store import ChunkRow, ChunkStanding

from .desk import OpenLibrary
from .document_schemas import DeletedDocument, DocumentDetail, DocumentObject, DocumentPage, StartedDocument
from .guard import tenant_of
from .library_schema import Chunk, Document, Job, Owner
from .reading import UPLOAD_SUFFIXES
from .refusals import RefusedError
from .schemas import answers_with
from .state import state_of

__all__ = ["UPLOAD_BODY", "After", "Limit", "Owned", "found_document", "given_upload", "page", "router", "told"]

router = APIRouter()

T = TypeVar("T", Document, Job)

_NAME_CHARS = 255


def _owner(http: Request, tenant: Annotated[str | None, Query(min_length=1, max_length=128)] = None) -> Owner:
    return Owner(tenant_of(http), tenant)


Owned = Annotated[Owner, Depends(_owner)]
Limit = Annotated[int, Query(ge=1, le=100)]
After = Annotated[str | None, Query(max_length=64)]
Search = Annotated[str | None, Query(min_length=1, max_length=_NAME_CHARS)]


class _About(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(default="", max_length=_NAME_CHARS)
    metadata: dict[str, Any] = Field(default_factory=dict)
    expires_at: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class _TextUpload(_About):
    text: str = Field(min_length=1)


class _FileUpload(BaseModel):
    file: bytes = Field(json_schema_extra={"format": "binary"})
    name: str | None = Field(default=None, max_length=_NAME_CHARS)
    metadata: str = Field(default="{}", description="A JSON object.")
    expires_at: float | None = None


# For the schema: a route reads it by itself, since it may be either.
UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": _TextUpload.model_json_schema()},
            "multipart/form-data": {"schema": _FileUpload.model_json_schema()},
        },
    }
}


class _Lifetime(BaseModel):
    model_config = ConfigDict(extra="forbid")

    expires_at: float | None = Field(gt=0, allow_inf_nan=False)


class _Upload(NamedTuple):
    about: _About
    suffix: str
    content: bytes


@router.post("/v1/documents", status_code=202, openapi_extra=UPLOAD_BODY, responses=answers_with(StartedDocument, 202))
async def upload(http: Request, owner: Owned) -> dict[str, Any]:
    """Take a document, as a form's file or as JSON with a text; it is ingested by a job."""
    state = state_of(http)
    state.check_open()
    state.documents.jobs.check_room(owner)
    given = await given_upload(http)
    await run_in_threadpool(state.documents.check_bytes, owner, len(given.content))
    if given.about.expires_at is not None and given.about.expires_at <= time.time():
        raise RefusedError("expires_at: is over already; give seconds since 1970", param="expires_at")

    def added() -> dict[str, Any]:
        with state.documents.open(owner, make=True) as opened:
            library, about = opened.library, given.about
            metadata = json.dumps(about.metadata, ensure_ascii=True)
            document, job = library.add(about.name, given.suffix, given.content, metadata, about.expires_at)
            state.documents.jobs.start(owner, job, document)
            return {**told(opened, found_document(opened, document)), "job_id": job}

    return await run_in_threadpool(added)


@router.get("/v1/documents", responses=answers_with(DocumentPage))
def documents(
    http: Request, owner: Owned, limit: Limit = 20, after: After = None, search: Search = None
) -> dict[str, Any]:
    """List documents, the oldest first; with `search` those whose name or id has this in it, in either case."""
    with state_of(http).documents.open(owner) as opened:
        holders = opened.engine.store.pins.holders()
        found = opened.library.documents(limit + 1, after, search)
        return page(found, limit, lambda one: {"pinned": one.id in holders})


@router.get("/v1/documents/{id_}", responses=answers_with(DocumentDetail))
async def document(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Return a document with its chunks."""

    def found() -> dict[str, Any]:
        with state_of(http).documents.open(owner) as opened:
            about, chunks = told(opened, found_document(opened, id_)), opened.library.chunks(id_)
            keys = opened.engine.corpus.keys_of([chunk.text for chunk in chunks])
            stored = [key for key in keys if key is not None]
            rows, standings = opened.engine.store.rows(stored), opened.engine.store.standings(stored)
            about["chunks"] = [
                _chunk(chunk, rows.get(key or ""), standings.get(key or ""))
                for chunk, key in zip(chunks, keys, strict=True)
            ]
            about["tokens"] = sum(len(row.token_ids) for row in rows.values())
            about["stored_bytes"] = sum(row.nbytes for row in rows.values())
            return about

    return await run_in_threadpool(found)


@router.patch("/v1/documents/{id_}", responses=answers_with(DocumentObject))
def change(http: Request, owner: Owned, id_: str, wanted: _Lifetime) -> dict[str, Any]:
    """Say until when a document is kept; null keeps it."""
    with state_of(http).documents.open(owner) as opened:
        changed = told(opened, found_document(opened, id_)) | {"expires_at": wanted.expires_at}
        opened.library.expire(id_, wanted.expires_at)
        return changed


@router.delete("/v1/documents/{id_}", responses=answers_with(DeletedDocument))
async def delete(http: Request, owner: Owned, id_: str) -> dict[str, Any]:
    """Delete a document, its chunks, and the KV that no other document of the tenant has."""
    desk = state_of(http).documents

    def deleted() -> dict[str, Any]:
        with desk.open(owner) as opened:
            found_document(opened, id_)
            desk.libraries.remove(opened.engine, opened.library, id_)
            return {"id": id_, "object": "document.deleted", "deleted": True}

    return await run_in_threadpool(deleted)


def told(opened: OpenLibrary, document: Document) -> dict[str, Any]:
    """Return a document as clients see it."""
    return document.to_dict() | {"pinned": document.id in opened.engine.store.pins.holders()}


def page(found: Sequence[T], limit: int, more: Callable[[T], dict[str, Any]] = lambda one: {}) -> dict[str, Any]:
    """Return one page of a list, of which one more was looked up to see whether there is another page."""
    data = [one.to_dict() | more(one) for one in found[:limit]]
    last = data[-1]["id"] if data else None
    return {"object": "list", "data": data, "has_more": len(found) > limit, "last_id": last}


def found_document(opened: OpenLibrary, id_: str) -> Document:
    """Return a document of who asks.

    Raises
    ------
    RefusedError
        If there is none.
    """
    found = opened.library.document(id_)
    if found is None:
        # Whether another tenant has it is nobody's business.
        raise RefusedError(f"There is no document {id_!r:.80}", 404, code="not_found")
    return found


def _chunk(chunk: Chunk, row: ChunkRow | None, standing: ChunkStanding | None) -> dict[str, Any]:
    """Return a chunk as clients see it; its KV may have gone between two looks at the store."""
    found: dict[str, Any] = {"chunk": chunk.number, "text": chunk.text, "stored": row is not None}
    found["tokens"] = None if row is None else len(row.token_ids)
    found["bytes"] = None if row is None else row.nbytes
    found["tier"] = None if standing is None else standing.tier
    found["uses"] = 0 if standing is None else standing.uses
    found["last_used_at"] = None if standing is None or not standing.uses else int(standing.used_s)
    return found


async def given_upload(http: Request) -> _Upload:
    """Return what a request uploads, as a form's file or as JSON with a text.

    Raises
    ------
    RefusedError
        If it is neither.
    """
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        async with http.form(max_files=1, max_fields=4, max_part_size=2**16) as form:
            return await _of_form(form)
    if kind != "application/json":
        raise RefusedError("Send a form with a file, or JSON with a text", 415, code="unsupported_media_type")
    try:
        sent = _TextUpload.model_validate_json(await http.body())
    except ValidationError as error:
        raise _invalid(error) from error
    try:
        return _Upload(sent, ".txt", sent.text.encode())
    except UnicodeEncodeError as error:
        raise RefusedError("text: half of a surrogate pair is no character", param="text") from error


async def _of_form(form: FormData) -> _Upload:
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise RefusedError("The form has no file: name it 'file'", param="file")
    fields = {name: value for name, value in form.items() if name != "file" and isinstance(value, str)}
    try:
        fields["metadata"] = json.loads(fields.get("metadata", "{}"))
        # Half of a surrogate pair, which JSON can say, is no text: UnicodeEncodeError is a ValueError.
        json.dumps(fields["metadata"], ensure_ascii=False).encode()
        fields.setdefault("name", PurePosixPath((file.filename or "").replace("\\", "/")).name[-_NAME_CHARS:])
        about = _About.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error
    except (ValueError, RecursionError) as error:
        raise RefusedError("metadata: not a JSON object", param="metadata") from error
    # Only what kind of file it is is taken from its name.
    suffix = PurePosixPath(file.filename or "").suffix.lower()
    if suffix not in UPLOAD_SUFFIXES:
        known = ", ".join(UPLOAD_SUFFIXES)
        raise RefusedError(f"Files of type {suffix!r:.20} are not read here, only {known}", 415, param="file")
    return _Upload(about, suffix, await file.read())


def _invalid(error: ValidationError) -> RefusedError:
    first = error.errors(include_url=False, include_context=False)[0]
    param = ".".join(map(str, first["loc"])) or None
    return RefusedError(first["msg"] if param is None else f"{param}: {first['msg']}", param=param)
