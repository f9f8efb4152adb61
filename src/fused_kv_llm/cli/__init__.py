"""The command line: ``fused-kv ingest | ask | demo | calibrate | store``. The only room that prints."""

from __future__ import annotations

from fused_kv_llm.cli.main import app

__all__ = ["app"]
