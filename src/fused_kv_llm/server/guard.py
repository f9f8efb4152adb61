"""What every request has to pass: the host it names, the page it comes from, its key, and the size of its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Callable
from typing import cast

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .config import ServerConfig
from .refusals import RefusedError, error_response
from .web import PATHS as WEB_PATHS

__all__ = ["Guard", "body_bytes_of", "tenant_of"]

# Asked by machines that have no key, and telling nothing.
_OPEN_PATHS = frozenset({"/health", "/ready", "/version"}) | WEB_PATHS
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Guard:
    """An ASGI layer that refuses what should not reach the application.

    Parameters
    ----------
    app : ASGIApp
    config : ServerConfig
    on_refused : callable
        Called with the status of every response that is an error.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig, on_refused: Callable[[int], None]) -> None:
        self._app, self._config, self._on_refused = app, config, on_refused
        self._keys = [(tenant, _digest(key.get_secret_value())) for tenant, key in config.api_keys.items()]
        self._held = _Held()
        self._hosts = _LOCAL_NAMES | {config.host, *config.allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False
        body = _Body(receive, self._config, self._held)

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._on_refused(message["status"])
            await send(message)

        try:
            await self._app(scope, self._admitted(scope, body), watched)
        except RefusedError as refusal:
            # Of the guard's own, or of a body as it is read.
            if started:
                raise
            await error_response(refusal)(scope, receive, watched)
        finally:
            body.release()

    def _admitted(self, scope: Scope, body: _Body) -> Receive:
        """Check a request before its body, and return what reads that."""
        headers = Headers(scope=scope)
        self._check_host(headers)
        self._check_origin(headers)
        scope["fused_kv_tenant"], scope["fused_kv_body"] = self._tenant(scope, headers), body
        body.check_length(headers)
        return body.receive

    def _check_host(self, headers: Headers) -> None:
        """Refuse names that this server does not have: a page elsewhere may have its own name lead here."""
        host = headers.get("host", "").lower()
        name = host.rpartition(":")[0] if ":" in host.rpartition("]")[2] else host
        if self._config.is_local and name not in self._hosts:
            raise RefusedError(f"The host {name!r:.80} is not one of this server's: add it to allowed_hosts", 403)

    def _check_origin(self, headers: Headers) -> None:
        origin, allowed = headers.get("origin"), self._config.allowed_origins
        if origin is None or "*" in allowed or origin in allowed:
            return
        if origin.partition("://")[2] != headers.get("host"):
            raise RefusedError(f"Pages of {origin!r:.80} may not ask this server: add it to allowed_origins", 403)

    def _tenant(self, scope: Scope, headers: Headers) -> str:
        if not self._keys or scope["path"] in _OPEN_PATHS:
            return ""
        kind, _, given = headers.get("authorization", "").partition(" ")
        digest = _digest(given.strip())
        # All are compared, and each in the same time, so that the clock does not tell how close a guess was.
        found = [tenant for tenant, key in self._keys if hmac.compare_digest(key, digest)]
        if kind.lower() != "bearer" or not found:
            raise RefusedError("A valid key is needed: Authorization: Bearer KEY", 401, code="invalid_api_key")
        return found[0]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


class _Held:
    """The bytes of all bodies that are held now; used in the event loop only."""

    nbytes = 0


class _Body:
    """The body of a request as it comes; one that is too large or too slow is refused."""

    def __init__(self, receive: Receive, config: ServerConfig, held: _Held) -> None:
        self._receive, self._config, self._held = receive, config, held
        self.nbytes, self._complete, self._begun_s = 0, False, time.monotonic()

    def check_length(self, headers: Headers) -> None:
        """Refuse what says of itself that it is too large."""
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self._config.max_body_bytes:
            self._refuse()

    async def receive(self) -> Message:
        """Return the next part."""
        if self._complete:
            return await self._receive()
        config = self._config
        over_s = self._begun_s + config.body_timeout_s + self.nbytes / config.body_bytes_per_s
        try:
            left_s = max(0.05, over_s - time.monotonic())
            message = await asyncio.wait_for(self._receive(), min(config.body_timeout_s, left_s))
        except TimeoutError as error:
            raise RefusedError("The body did not come in time", 408) from error
        nbytes = len(message.get("body", b""))
        self.nbytes += nbytes
        self._held.nbytes += nbytes
        self._complete = not message.get("more_body", False)
        if self.nbytes > config.max_body_bytes:
            self._refuse()
        if self._held.nbytes > config.max_bodies_bytes:
            raise RefusedError("Too many large requests at once; ask again later", 503, kind="server_error")
        return message

    def release(self) -> None:
        """Forget the body: its request has ended."""
        self._held.nbytes -= self.nbytes
        self.nbytes = 0

    def _refuse(self) -> None:
        raise RefusedError(f"The body is larger than {self._config.max_body_bytes} bytes", 413)


def tenant_of(request: Request) -> str:
    """Return the tenant whose key a request has; empty without keys."""
    return cast(str, request.scope["fused_kv_tenant"])


def body_bytes_of(request: Request) -> int:
    """Return the size of a request's body, as far as it has come."""
    return cast(_Body, request.scope["fused_kv_body"]).nbytes
