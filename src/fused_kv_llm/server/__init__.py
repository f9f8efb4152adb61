"""An OpenAI-compatible server over the engine (extra ``server``)."""

from __future__ import annotations

from .app import create_app
from .config import ServerConfig
from .run import serve

__all__ = ["ServerConfig", "create_app", "serve"]
