"""A row for each tenant: what it asked, how much of that was at hand, what it stores, and what it may."""

from __future__ import annotations

from typing import Any

from fused_kv_llm.engine import FusedKVEngine

from .library_schema import Owner
from .state import ServerState
from .stored_bytes import stored_bytes_of

__all__ = ["tenant_rows"]

_MOST_ROWS = 50
_FIGURES = ("requests", "tokens", "hit_rates", "saved")


def tenant_rows(state: ServerState, engine: FusedKVEngine, tenant: str) -> list[dict[str, Any]]:
    """Return a row for a tenant, and one for each further name that its clients gave; without keys those of everybody.

    Parameters
    ----------
    state : ServerState
    engine : FusedKVEngine
        Any of this server's: its store has everybody's chunks.
    tenant : str
        Who asks; empty without keys.

    Returns
    -------
    list of dict
        The 50 with the most requests. ``quota`` is the whole tenant's, so it stands in the row without a name.
    """
    own = Owner(tenant, None)
    libraries = [one for one in state.documents.libraries.owners() if not state.config.api_keys or one.tenant == tenant]
    tenants = {own.tenant, *(one.tenant for one in libraries)}
    asked = {
        Owner(one, part): figures
        for one in tenants
        for part, figures in state.recorder.activity.parts(state.tenants.name(one)).items()
    }
    owners = sorted(
        {own, *libraries, *asked}, key=lambda one: (-_requests(asked.get(one)), one.tenant, one.apart or "")
    )
    return [_row(state, engine, one, asked.get(one)) for one in owners[:_MOST_ROWS]]


def _row(state: ServerState, engine: FusedKVEngine, owner: Owner, figures: dict[str, Any] | None) -> dict[str, Any]:
    tenant = owner.tenant or "default"
    quota = None if owner.apart is not None else state.config.quotas.get(tenant)
    return {
        "tenant": tenant,
        "name": owner.apart,
        **{name: None if figures is None else figures[name] for name in _FIGURES},
        "stored_bytes": stored_bytes_of(engine, [state.tenants.name(*owner)]),
        "quota": None if quota is None else quota.model_dump(),
    }


def _requests(figures: dict[str, Any] | None) -> int:
    return 0 if figures is None else sum(figures["requests"].values())
