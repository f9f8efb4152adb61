"""What the routes of documents answer, for the schema; see :mod:`.schemas`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from fused_kv_llm.report import Outcome

__all__ = [
    "CheckedText", "DeletedDocument", "DocumentDetail", "DocumentObject", "DocumentPage", "StartedDocument",
    "WarmedDocument",
]  # fmt: skip


class _Document(BaseModel):
    id: str
    object: Literal["document"]
    name: str
    type: str
    metadata: dict[str, Any]
    bytes: int
    """Of what was uploaded."""
    created_at: int
    expires_at: float | None
    ready: bool
    """Whether it can be retrieved."""
    pinned: bool


class DocumentObject(_Document):
    """A document."""

    chunks: int


class StartedDocument(DocumentObject):
    """A document, and the job that ingests it."""

    job_id: str


class DocumentPage(BaseModel):
    """A page of documents."""

    object: Literal["list"]
    data: list[DocumentObject]
    has_more: bool
    last_id: str | None


class StoredChunk(BaseModel):
    """A chunk of a document, and where its KV is."""

    chunk: int
    text: str
    stored: bool
    tokens: int | None
    bytes: int | None
    """Of its KV's file; null where it is not stored."""
    tier: Literal["memory", "disk", "remote"] | None
    uses: int
    last_used_at: int | None


class DocumentDetail(_Document):
    """A document with its chunks."""

    tokens: int
    """Of its chunks that are stored."""
    stored_bytes: int
    """Of their KV's files."""
    chunks: list[StoredChunk]


class DeletedDocument(BaseModel):
    """A document that was deleted."""

    id: str
    object: Literal["document.deleted"]
    deleted: Literal[True]


class WarmedDocument(BaseModel):
    """How many chunks are loaded, and how many cannot be."""

    id: str
    loading: int
    not_stored: int


class CheckedText(BaseModel):
    """Whether a text would be reused, and if not, why."""

    text: str
    """Its beginning."""
    outcome: Outcome
    detail: str
    remedy: str
    diff: str
    chunk_id: str | None
    tokens: int
    score: float | None
