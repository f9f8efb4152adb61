"""Running the application: a server that ends what it has begun."""

from __future__ import annotations

import sys
from types import FrameType

import uvicorn

from fused_kv_llm.engine import FusedKVEngine

from .app import create_app
from .config import ServerConfig
from .connections import listening_options

__all__ = ["serve"]

# The store's, its loaders' and the libraries' own.
_OTHER_FILES = 1024


def serve(engine: FusedKVEngine, config: ServerConfig | None = None) -> None:
    """Serve until the process is told to end (SIGTERM, or Ctrl-C); running answers are completed then.

    Parameters
    ----------
    engine : FusedKVEngine
        Closed by whoever made it.
    config : ServerConfig or None
        None takes the defaults.
    """
    config = config or ServerConfig()
    app = create_app(engine, config)
    options = listening_options(app, config)
    _allow_open_files(config.max_connections)

    class Draining(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.fused_kv.drain()
            super().handle_exit(sig, frame)

    Draining(options).run()


def _allow_open_files(connections: int) -> None:
    """Let the process have a file for every connection, as far as the system lets it: there are often only 1024."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
