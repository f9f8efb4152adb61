"""The gateway: what clients reach. It forwards whole requests to replicas, and survives the death of one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fused_kv_llm.server import (
    ANSWERING,
    Guard,
    Quotas,
    RefusedError,
    ServerConfig,
    last_events,
    name_below,
    refusal_of,
)

from .forwarding import Call
from .placement import RoutingKey
from .routing_keys import RoutingKeys

__all__ = ["Answering", "Ask", "gateway_app"]

_log = logging.getLogger(__name__)

# They change nothing, or what a second answer does not change again.
_REPEATABLE = ANSWERING | {"/tokenize"}
_ONE_PROCESS = ("/v1/documents", "/v1/jobs")
_REQUESTS = "/v1/requests/"
_COUNTED = ANSWERING | {"/v1/compare"}


class Answering(Protocol):
    """A response under way at a replica."""

    def __aiter__(self) -> AsyncIterator[Mapping[str, Any]]:
        """Iterate over ASGI messages."""

    def cancel(self) -> None:
        """End the request; one that has ended already is left alone."""


Ask = Callable[[Call, RoutingKey], Answering]
"""Sends a request to a replica that the router chooses."""


def gateway_app(
    ask: Ask,
    keys: RoutingKeys,
    config: ServerConfig,
    lost: tuple[type[Exception], ...],
    attempts: int = 4,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> ASGIApp:
    """Return the application that clients reach.

    A key, a host or a body that is refused is refused here, by the server's own guard, and reaches no replica.

    Parameters
    ----------
    ask : callable
    keys : RoutingKeys
    config : ServerConfig
        The replicas' as well, but that requests are counted here, with its quotas.
    lost : tuple of type
        Errors that say that a replica is gone, or that none is there.
    attempts : int
        Replicas that a request may be sent to, one after another, while nothing of an answer has come.
    beside : callable or None
        What is done from the application's beginning to its end, beside requests.
    """
    quotas = Quotas(config.quotas, lambda tenant, what: _log.info("Over the quota of %s: %r", what, tenant))
    return Guard(_Gateway(ask, keys, lost, attempts, beside, quotas), config, lambda _: None)


class _Gateway:
    def __init__(
        self,
        ask: Ask,
        keys: RoutingKeys,
        lost: tuple[type[Exception], ...],
        attempts: int,
        beside: Callable[[], Coroutine[Any, Any, None]] | None,
        quotas: Quotas,
    ) -> None:
        self._quotas = quotas
        self._ask, self._keys, self._lost, self._attempts, self._beside = ask, keys, lost, attempts, beside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        request = Request(scope, receive)
        try:
            call = Call.of(scope, await request.body())
        except ClientDisconnect:
            return
        _check_one_process(call)
        if call.path in _COUNTED and call.scope["method"] == "POST":
            self._quotas.admit(scope["fused_kv_tenant"])
        key = await asyncio.to_thread(self._key, call, scope["fused_kv_tenant"])
        answering = asyncio.create_task(self._answer(call, key, send))
        leaving = asyncio.create_task(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        task = None if self._beside is None else asyncio.create_task(self._beside())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await send({"type": "lifespan.shutdown.complete"})

    def _key(self, call: Call, tenant: str) -> RoutingKey:
        if call.path not in ANSWERING:
            return RoutingKey(0)
        asked = call.json()
        options = asked.get("fused_kv")
        options = options if isinstance(options, dict) else {}
        if options.get("retrieve") is not None:
            raise _needs_one_process("fused_kv.retrieve")
        apart = options.get("tenant")
        return self._keys.key_of(asked, name_below(tenant, apart if isinstance(apart, str) else None))

    async def _answer(self, call: Call, key: RoutingKey, send: Send) -> None:
        sent = _Sent(send)
        for attempt in range(1, self._attempts + 1):
            answering = self._ask(call, key)
            try:
                async for message in answering:
                    await sent.pass_on(dict(message))
                return
            except self._lost as error:
                if sent.complete:
                    return
                _log.warning("A replica was lost while it answered %s (attempt %d): %r", call.path, attempt, error)
                if sent.begun:
                    await sent.break_off()
                    return
                if not _may_be_repeated(call):
                    raise RefusedError(
                        "The replica that had this request was lost; it may have been carried out, or not",
                        503, kind="server_error", code="replica_lost",
                    ) from error  # fmt: skip
            except RefusedError:
                raise
            except Exception as error:
                if sent.begun:
                    raise
                raise refusal_of(error) from error
            finally:
                answering.cancel()
        raise RefusedError(
            f"{self._attempts} replicas were lost while they had this request; ask again later",
            503, kind="server_error", code="replica_lost",
        )  # fmt: skip


class _Sent:
    """Passes a response on; its head waits for the first part of its body, since until then it can begin anew."""

    def __init__(self, send: Send) -> None:
        self._send, self._head = send, _NO_HEAD
        self.begun = self.complete = False

    async def pass_on(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._head = message
            return
        if not self.begun:
            self.begun = True
            await self._send(self._head)
        await self._send(message)
        self.complete = message["type"] == "http.response.body" and not message.get("more_body", False)

    async def break_off(self) -> None:
        """End a response that has begun: a stream with an error, anything else by breaking the connection."""
        types = [value for name, value in self._head["headers"] if name.lower() == b"content-type"]
        if not types or not types[0].startswith(b"text/event-stream"):
            raise _broken_off()
        await self._send(
            {"type": "http.response.body", "body": last_events(_broken_off()).encode(), "more_body": False}
        )


_NO_HEAD: Message = {"type": "http.response.start", "status": 500, "headers": []}


def _broken_off() -> RefusedError:
    return RefusedError(
        "The replica that wrote this answer was lost, and the rest of it with it: ask again",
        503, kind="server_error", code="replica_lost",
    )  # fmt: skip


def _may_be_repeated(call: Call) -> bool:
    return call.scope["method"] in ("GET", "HEAD") or call.path in _REPEATABLE


def _check_one_process(call: Call) -> None:
    """Refuse what one process has to do for all: documents, jobs and single requests are in the hands of one."""
    if any(call.path == path or call.path.startswith(f"{path}/") for path in _ONE_PROCESS):
        raise _needs_one_process(call.path)
    if call.path.startswith(_REQUESTS):
        raise RefusedError(
            f"{call.path} is not served by several replicas: only the one that answered a request knows of it, and "
            "this may be another one. The report of an answer is in its fused_kv",
            501, code="not_with_replicas",
        )  # fmt: skip


def _needs_one_process(what: str) -> RefusedError:
    return RefusedError(
        f"{what} is not served by several replicas: ingest documents with `fused-kv ingest`, and send retrieved chunks "
        "in the messages",
        501, code="not_with_replicas",
    )  # fmt: skip


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
