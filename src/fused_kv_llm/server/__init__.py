"""An OpenAI-compatible server over the engine (extra ``server``)."""

from __future__ import annotations

from .app import create_app
from .config import ServerConfig
from .guard import Guard
from .quotas import Quotas
from .recorder import ANSWERING
from .refusals import RefusedError, refusal_of
from .run import serve
from .streaming import last_events
from .tenants import name_below

__all__ = [
    "ANSWERING",
    "Guard",
    "Quotas",
    "RefusedError",
    "ServerConfig",
    "create_app",
    "last_events",
    "name_below",
    "refusal_of",
    "serve",
]
