"""Running the application: a server that ends what it has begun."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import uvicorn

from fused_kv_llm.engine import FusedKVEngine

from .app import create_app
from .config import ServerConfig
from .connections import listening_options
from .samples import add_files

__all__ = ["serve"]

# The store's, its loaders' and the libraries' own.
_OTHER_FILES = 1024


def serve(
    engine: FusedKVEngine,
    config: ServerConfig | None = None,
    *,
    documents: Sequence[Path] = (),
    on_started: Callable[[str], None] | None = None,
) -> None:
    """Serve until the process is told to end (SIGTERM, or Ctrl-C); running answers are completed then.

    Parameters
    ----------
    engine : FusedKVEngine
        Closed by whoever made it.
    config : ServerConfig or None
        None takes the defaults.
    documents : sequence of Path
        Files that are ingested beside requests, unless documents of their names are there.
    on_started : callable or None
        Called with the address of the web UI when requests are taken.
    """
    config = config or ServerConfig()
    app = create_app(engine, config)
    add_files(app.state.fused_kv.documents, documents)
    options = listening_options(app, config)
    _allow_open_files(config.max_connections)

    class Draining(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.fused_kv.drain()
            super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started and on_started is not None:
                on_started(_address(self, self.config.host))

    Draining(options).run()


def _address(server: uvicorn.Server, host: str) -> str:
    """Return where a browser finds a server that has started; its port may have been chosen by the system."""
    port = server.servers[0].sockets[0].getsockname()[1]
    name = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{name}:{port}/"


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
