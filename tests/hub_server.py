"""A hub in miniature: one model's files behind the few headers that the hub's client wants."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

COMMIT = "0" * 40


@contextmanager
def served_hub(folder: Path, model_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Serve a folder as `model_id`, the only one there is; yields what was asked for, ``"GET /path"``."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def _answer(self, *, with_body: bool) -> None:
            asked.append(f"{self.command} {self.path}")
            name = self.path.removeprefix(f"/{model_id}/resolve/main/").removeprefix(f"/{model_id}/resolve/{COMMIT}/")
            path = folder / name
            known, found = self.path.startswith(f"/{model_id}/"), "/" not in name and path.is_file()
            body = path.read_bytes() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("X-Repo-Commit", COMMIT)
            if not found:
                self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        use_hub(f"http://127.0.0.1:{server.server_port}", monkeypatch)
        yield asked
    finally:
        server.shutdown()
        server.server_close()


def use_hub(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the hub's client ask there."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
