"""``/v1/documents/estimate``: what a document would take, before it is uploaded for good."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel

from fused_kv_llm.engine import FusedKVEngine

from .document_routes import UPLOAD_BODY, Owned, given_upload
from .reading import read_upload
from .state import state_of
from .stored_bytes import bytes_per_token

__all__ = ["Estimate", "router"]

router = APIRouter()


class Estimate(BaseModel):
    """What the ingestion of a document needs; chunks that are stored already cost nothing."""

    chunks: int
    new_chunks: int
    tokens: int
    kv_bytes: int
    seconds_estimate: float | None
    """Of computing the KV on an idle machine; null until its times are measured."""


@router.post("/v1/documents/estimate", openapi_extra=UPLOAD_BODY)
async def estimate(http: Request, owner: Owned) -> Estimate:
    """Say how many chunks, tokens, bytes of KV and seconds an upload will need; nothing of it is kept."""
    state = state_of(http)
    state.check_open()
    given = await given_upload(http)

    def estimated() -> Estimate:
        with state.estimates.one(owner.tenant), state.tenants.using(*owner) as engine:
            texts = read_upload(given.content, given.suffix, state.documents.limits, state.check_open)
            return _estimate(engine, texts)

    return await run_in_threadpool(estimated)


def _estimate(engine: FusedKVEngine, texts: Sequence[str]) -> Estimate:
    keys = engine.corpus.keys_of(texts)
    new = [text for text, key in zip(texts, keys, strict=True) if key is None]
    lengths = [len(engine.token_ids(text)) for text in new]
    times = [engine.corpus.cost.prefill_s(0, length) for length in lengths]
    known = [seconds for seconds in times if seconds is not None]
    return Estimate(
        chunks=len(texts),
        new_chunks=len(new),
        tokens=sum(lengths),
        kv_bytes=sum(lengths) * bytes_per_token(engine),
        seconds_estimate=sum(known) if len(known) == len(times) else None,
    )
