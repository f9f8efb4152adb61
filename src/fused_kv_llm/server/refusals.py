"""Errors as OpenAI's protocol says them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException

from fused_kv_llm.errors import (
    ConfigError,
    CorpusError,
    DeadlineError,
    EngineClosedError,
    FusedKVError,
    MissingExtraError,
    PromptError,
    PromptTooLongError,
    QueueFullError,
)

__all__ = ["ERRORS", "RefusedError", "add_error_handlers", "error_response", "known_refusal", "refusal_of"]

_log = logging.getLogger(__name__)

RETRY_AFTER_S = 1


class ErrorObject(BaseModel):
    """Why a request is not answered, as OpenAI's protocol says it."""

    model_config = ConfigDict(title="Error")

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    """What is answered to a request that is refused."""

    error: ErrorObject


ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}
"""Responses that every route may have, for the schema."""
_FAILED = 500

# The first that fits: kind of error, status, OpenAI's type and code.
_KINDS: tuple[tuple[type[FusedKVError], int, str, str | None], ...] = (
    (PromptTooLongError, 400, "invalid_request_error", "context_length_exceeded"),
    (PromptError, 400, "invalid_request_error", None),
    (ConfigError, 400, "invalid_request_error", None),
    (CorpusError, 400, "invalid_request_error", None),
    (MissingExtraError, 501, "invalid_request_error", "not_installed"),
    (QueueFullError, 429, "rate_limit_error", "queue_full"),
    (DeadlineError, 504, "timeout_error", "deadline_exceeded"),
    (EngineClosedError, 503, "server_error", "shutting_down"),
)


class RefusedError(FusedKVError):
    """A request that is not answered.

    Parameters
    ----------
    message : str
    status : int
        Of HTTP.
    kind, code, param : str or None
        ``type``, ``code`` and ``param`` of OpenAI's error object.
    retry_after_s : int
        When to ask again, for statuses 429 and 503.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        kind: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after_s: int = RETRY_AFTER_S,
    ) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.message, self.status, self.kind, self.code, self.param = message, status, kind, code, param

    def to_dict(self) -> dict[str, Any]:
        """Return OpenAI's error object."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def refusal_of(error: BaseException) -> RefusedError:
    """Return what a client is told of an error; of those that are no fault of its own only that there was one."""
    refusal = known_refusal(error)
    if refusal.status == _FAILED:
        _log.error("A request has failed", exc_info=error)
    return refusal


def known_refusal(error: BaseException) -> RefusedError:
    """Return the same, without a word in the log."""
    if isinstance(error, RefusedError):
        return error
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            return RefusedError(str(error), status, kind=name, code=code)
    return RefusedError("The server could not answer this request; its log says why.", _FAILED, kind="server_error")


def error_response(error: BaseException) -> JSONResponse:
    """Return the response to a request that cannot be answered."""
    refusal = refusal_of(error)
    headers = {"Retry-After": str(refusal.retry_after_s)} if refusal.status in (429, 503) else {}
    if refusal.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(refusal.to_dict(), refusal.status, headers)


def add_error_handlers(app: FastAPI, on_invalid: Callable[[Request, RefusedError], None]) -> None:
    """Have every error of an application answered with OpenAI's error object.

    Parameters
    ----------
    app : FastAPI
    on_invalid : callable
        Called with a request whose body or query made no sense, and its refusal.
    """

    def told(request: Request, refusal: RefusedError) -> JSONResponse:
        on_invalid(request, refusal)
        return error_response(refusal)

    async def known(_: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    async def invalid(request: Request, error: Exception) -> JSONResponse:
        first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": str(error)}
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        message = str(first["msg"]).removeprefix("Value error, ")
        if first.get("type") == "extra_forbidden":
            return told(request, RefusedError(f"{param} is not supported: leave it out", param=param))
        return told(request, RefusedError(message if param is None else f"{param}: {message}", param=param))

    async def of_http(_: Request, error: Exception) -> JSONResponse:
        if isinstance(error.__cause__, RefusedError):
            # What ended the reading of a body.
            return error_response(error.__cause__)
        status = error.status_code if isinstance(error, HTTPException) else 500
        detail = str(error.detail) if isinstance(error, HTTPException) else "error"
        return error_response(RefusedError(detail, status, code="not_found" if status == 404 else None))

    app.add_exception_handler(FusedKVError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, of_http)
    app.add_exception_handler(Exception, known)
