"""Running the application: a server that ends what it has begun."""

from __future__ import annotations

from types import FrameType

import uvicorn

from fused_kv_llm.engine import FusedKVEngine

from .app import create_app
from .config import ServerConfig
from .request_log import log_settings

__all__ = ["serve"]


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
    options = uvicorn.Config(
        app,
        config.host,
        config.port,
        log_config=log_settings(config.log_format),
        # RequestLog writes a line of its own.
        access_log=False,
        server_header=False,
        date_header=False,
    )

    class Draining(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            app.state.fused_kv.drain()
            super().handle_exit(sig, frame)

    Draining(options).run()
