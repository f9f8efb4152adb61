"""The client's types are what the server's schema gives; FUSED_KV_UPDATE=1 writes them anew."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import httpx

WEB = Path(__file__).parents[2] / "web"
TYPES = WEB / "src/api/schema.d.ts"


def test_the_types_are_those_of_the_schema(ui_url: str, tmp_path: Path) -> None:
    schema, made = tmp_path / "openapi.json", tmp_path / "schema.d.ts"
    schema.write_text(httpx.get(f"{ui_url}/openapi.json").text)
    command = ["node", "node_modules/openapi-typescript/bin/cli.js", str(schema), "-o", str(made)]
    subprocess.run(command, cwd=WEB, check=True, capture_output=True, timeout=60)
    if os.environ.get("FUSED_KV_UPDATE"):
        TYPES.write_text(made.read_text())
    assert TYPES.read_text() == made.read_text(), "make web-types writes web/src/api/schema.d.ts anew"
