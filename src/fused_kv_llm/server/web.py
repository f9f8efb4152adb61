"""The web UI at ``/``: the files of its prebuilt bundle, with headers that let it load nothing from elsewhere."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib import resources

from fastapi import APIRouter, Request, Response

from .refusals import RefusedError

__all__ = ["HEADERS", "PATHS", "router"]

router = APIRouter(include_in_schema=False)

_POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data:",
    "connect-src": "'self'",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in _POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # The names never change, so a browser asks whether the content has.
    "Cache-Control": "no-cache",
}
_KINDS = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/assets/app.js": ("assets/app.js", "text/javascript; charset=utf-8"),
    "/assets/app.css": ("assets/app.css", "text/css; charset=utf-8"),
    "/assets/icon.svg": ("assets/icon.svg", "image/svg+xml"),
}
PATHS = frozenset(_KINDS)
"""Paths that need no key, since the files hold no data."""


@cache
def _file(name: str) -> tuple[bytes, str]:
    """Return a file and its ETag."""
    content = resources.files(__package__).joinpath("static", name).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:32]}"'


@router.head("/")
@router.get("/")
def page(http: Request) -> Response:
    """Return the page."""
    return _answer(http, "/")


@router.head("/assets/{name}")
@router.get("/assets/{name}")
def asset(http: Request, name: str) -> Response:
    """Return a file that the page loads."""
    return _answer(http, f"/assets/{name}")


def _answer(http: Request, path: str) -> Response:
    if path not in _KINDS:
        raise RefusedError(f"There is no file {path!r:.80}", 404, code="not_found")
    name, kind = _KINDS[path]
    content, etag = _file(name)
    headers = HEADERS | {"ETag": etag}
    if etag in [one.strip().removeprefix("W/") for one in http.headers.get("if-none-match", "").split(",")]:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=kind, headers=headers)
