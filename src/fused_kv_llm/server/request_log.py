"""A name for every request, and a line in the log; bodies, keys and queries are in neither."""

from __future__ import annotations

import copy
import json
import logging
import re
import time
import uuid
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import LOGGING_CONFIG

from fused_kv_llm.report import remote_parent

__all__ = ["JSONLines", "RequestLog", "log_settings"]

_log = logging.getLogger(__name__)

# What a client may call its request: anything else could forge a header, or a line.
_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")
# Machines ask these all the time.
_PROBES = frozenset({"/health", "/ready", "/metrics"})
_LEFT = 499


class RequestLog:
    """An ASGI layer that answers every request with ``X-Request-Id`` and writes a line when it has ended.

    Parameters
    ----------
    app : ASGIApp
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        name = scope["fused_kv_request"] = given if _NAME.fullmatch(given) else uuid.uuid4().hex
        # Of a client that leaves before there is one, as it is usual.
        started_s, status = time.perf_counter(), _LEFT

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
            await send(message)

        try:
            with remote_parent(Headers(scope=scope)):
                await self._app(scope, receive, named)
        finally:
            line = {"request_id": name, "tenant": scope.get("fused_kv_tenant", ""), "method": scope["method"],
                    "path": quote(scope["path"]), "status": status,
                    "seconds": round(time.perf_counter() - started_s, 4)}  # fmt: skip
            level = logging.DEBUG if scope["path"] in _PROBES else logging.INFO
            _log.log(level, "%(method)s %(path)s %(status)d %(seconds).3f s %(request_id)s", line, extra={"line": line})


class JSONLines(logging.Formatter):
    """Writes a record as a line of JSON: time, level, logger, message, and the fields of a request."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "line", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_settings(form: str) -> dict[str, Any]:
    """Return how a server's process writes its log: ``"text"``, or ``"json"`` line by line."""
    settings: dict[str, Any] = copy.deepcopy(LOGGING_CONFIG)
    if form == "json":
        settings["formatters"]["default"] = {"()": JSONLines}
    settings["loggers"]["fused_kv_llm"] = {"handlers": ["default"], "level": "INFO", "propagate": False}
    return settings
