"""``/v1/requests`` and ``/v1/operations``: what became of a tenant's requests, one by one and in sums."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool

from fused_kv_llm.engine import FusedKVEngine

from .guard import tenant_of
from .history import History
from .history_query import HistoryQuery
from .refusals import RefusedError
from .state import ServerState, state_of
from .tenant_rows import tenant_rows

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/requests")
def requests(http: Request, wanted: Annotated[HistoryQuery, Query()]) -> dict[str, Any]:
    """List requests, the newest first."""
    history, tenant = _history(http)
    found = history.summaries(tenant, wanted.limit + 1, wanted)
    return {"object": "list", "data": found[: wanted.limit], "has_more": len(found) > wanted.limit}


@router.get("/v1/requests/{id_}")
def request(http: Request, id_: str) -> dict[str, Any]:
    """Return a request with what is kept of it."""
    history, tenant = _history(http)
    found = history.detail(tenant, id_)
    if found is None:
        raise _missing(id_)
    return found


@router.get("/v1/requests/{id_}/trace")
def trace(http: Request, id_: str) -> dict[str, Any]:
    """Return what became of each token of a request's prompt."""
    history, tenant = _history(http)
    found = history.trace(tenant, id_)
    if found is None:
        raise _missing(id_)
    if found[0] is None:
        detail = history.detail(tenant, id_) or {}
        if not detail.get("detail_available"):
            raise RefusedError("Texts of requests are not kept: see request_log", 404, code="texts_not_kept")
        raise RefusedError("The request did not come to an answer that has a trace", 404, code="no_trace")
    return found[0]


@router.delete("/v1/requests/{id_}")
def forget(http: Request, id_: str) -> dict[str, Any]:
    """Forget a request, and its texts."""
    history, tenant = _history(http)
    found = history.detail(tenant, id_)
    if found is None or not history.remove(tenant, found["id"]):
        raise _missing(id_)
    return {"id": found["id"], "object": "request.deleted", "deleted": True}


@router.get("/v1/operations")
async def operations(http: Request, minutes: Annotated[float, Query(gt=0, le=1440)] = 15.0) -> dict[str, Any]:
    """Return a tenant's numbers; without keys they are everybody's, and ``tenants`` has a row for each."""
    state = state_of(http)
    tenant = state.tenants.name(tenant_of(http))
    found = {"object": "operations", "model": state.model_name} | state.recorder.activity.of(tenant, 60 * minutes)
    running, waiting = state.tenants.default.requests.open
    if not state.config.api_keys:
        # Of all tenants together, which is nobody's business but an operator's.
        found |= {"running": running, "waiting": waiting}
    return found | await run_in_threadpool(_stored, state, tenant_of(http))


def _stored(state: ServerState, tenant: str) -> dict[str, Any]:
    with state.tenants.using(tenant) as engine:
        of_one = bool(state.config.api_keys)
        return {"store": _store(engine, of_one=of_one), "tenants": tenant_rows(state, engine, tenant)}


def _store(engine: FusedKVEngine, *, of_one: bool) -> dict[str, Any]:
    """Return what is stored of a tenant or of all, and what this process has done with it."""
    stats, counters = engine.store.stats(), asdict(engine.store.counters())
    memory = {
        "chunks": stats.memory_chunks,
        "bytes": stats.memory_bytes,
        "budget_bytes": engine.config.memory_bytes,
    }
    tiers: dict[str, dict[str, Any]] = {"memory": memory}
    if of_one:
        own = [row for row in stats.identities if row.identity == engine.identity]
        tiers["disk"] = {"chunks": sum(row.disk_chunks for row in own), "bytes": sum(row.disk_bytes for row in own)}
        tiers["remote"] = {
            "chunks": sum(row.remote_chunks for row in own),
            "bytes": sum(row.remote_bytes for row in own),
        }
    else:
        tiers |= {name: {"chunks": count, "bytes": size} for name, (count, size) in stats.tiers.items()}
    tiers["disk"]["budget_bytes"] = stats.disk_bytes
    return {
        "tiers": tiers,
        "evictions": {"memory": counters["evicted_memory"], "disk": counters["evicted_disk"]},
        "damaged": counters["damaged"],
        "counters": counters,
    }


def _history(http: Request) -> tuple[History, str]:
    state = state_of(http)
    if state.history is None:
        raise RefusedError("Requests are not kept: start the server with request_log", 404, code="requests_not_kept")
    return state.history, state.tenants.name(tenant_of(http))


def _missing(id_: str) -> RefusedError:
    # Whether another tenant has it is nobody's business.
    return RefusedError(f"There is no request {id_!r:.80}, or it was too old to keep", 404, code="not_found")
