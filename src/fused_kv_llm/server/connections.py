"""Connections that are given up: clients that do not say what they want, or do not read what they are told."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import socket
import struct
from collections.abc import Callable
from typing import Any, cast

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from .config import ServerConfig
from .refusals import RETRY_AFTER_S, RefusedError
from .request_log import log_settings

__all__ = ["Connection", "listening_options"]

_log = logging.getLogger(__name__)


def listening_options(app: ASGIApp, config: ServerConfig, **further: Any) -> uvicorn.Config:
    """Return the options of uvicorn with which an application is served to strangers.

    Parameters
    ----------
    app : ASGIApp
    config : ServerConfig
    **further
        Other options of uvicorn.

    Returns
    -------
    uvicorn.Config
    """
    options: dict[str, Any] = {
        "host": config.host,
        "port": config.port,
        "log_config": log_settings(config.log_format),
        # RequestLog writes a line of its own.
        "access_log": False,
        "server_header": False,
        "date_header": False,
        "http": functools.partial(Connection, limits=config),
        # There is nothing for it here, and the guard looks at requests of HTTP only.
        "ws": "none",
        "timeout_keep_alive": config.keep_alive_s,
        "h11_max_incomplete_event_size": config.max_head_bytes,
    }
    return uvicorn.Config(app, **options | further)


class Connection(H11Protocol):
    """A connection with limits: to send a request, to read its answer, and on how many there are.

    uvicorn waits for a first request, and for the end of a head, without end, and keeps the bytes of a closed
    connection until its client has read them. When there are too many connections the one makes room that has waited
    longest: for its head, else for its body, else for its client to read.

    Parameters
    ----------
    *args, **options
        As uvicorn gives them.
    limits : ServerConfig
    """

    def __init__(self, *args: Any, limits: ServerConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self._limits = limits
        self._sending = _Timer(self.loop, limits.head_timeout_s, self.give_up)
        self._reading = _Timer(self.loop, limits.write_timeout_s, self._end_unread)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, if there is room."""
        super().connection_made(transport)
        unread = self._limits.max_unread_bytes
        transport.set_write_buffer_limits(high=unread)
        if (own := transport.get_extra_info("socket")) is not None:
            # By itself the system would let it grow to megabytes.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, unread)
        if len(self.connections) > self._limits.max_connections and not self._make_room():
            self._refuse()
            return
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Read what a client sends."""
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        """Wait for the next request, and for the answer to be read."""
        self._sending.stop()
        super().on_response_complete()
        if self.conn.trailing_data[0] or self.conn.their_state is h11.SEND_BODY:
            self._await_request()
        self._await_reading()

    def pause_writing(self) -> None:
        """Wait for a client that does not read as fast as it is answered."""
        super().pause_writing()
        self._await_reading()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        if self.cycle is None or not self.cycle.response_complete:
            self._reading.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._sending.stop()
        self._reading.stop()
        super().connection_lost(exc)

    def rank(self) -> tuple[int, float] | None:
        """Return how soon the connection makes room for another, the lowest first; None if it does not."""
        if self._lacks_request():
            return 0, self._sending.began_s
        if self.conn.their_state is h11.SEND_BODY:
            return 1, self._sending.began_s
        return (2, self._reading.began_s) if self._reading.runs else None

    def give_up(self) -> None:
        """End the connection at once; a request that is answered through it is cancelled."""
        own = self.transport.get_extra_info("socket")
        if own is not None and self.transport.get_write_buffer_size():
            # Else the system would keep what it has taken over until the client reads it.
            own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _lacks_request(self) -> bool:
        """Whether nothing can be done before the client has sent more."""
        if self.conn.their_state is h11.IDLE:
            return True
        # An answer that did not wait for the body: a refusal.
        return self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete

    def _await_request(self) -> None:
        if not self._lacks_request():
            self._sending.stop()
        elif not self.transport.is_closing():
            self._sending.start()

    def _await_reading(self) -> None:
        if self.transport.get_write_buffer_size():
            self._reading.start()

    def _end_unread(self) -> None:
        if self.transport.get_write_buffer_size():
            _log.warning("A client does not read its answer: the connection is given up")
            self.give_up()

    def _make_room(self) -> bool:
        others = [one for one in cast(set[Connection], self.connections) if one is not self]
        ranked = [(rank, one) for one in others if (rank := one.rank()) is not None and not one.transport.is_closing()]
        if ranked:
            min(ranked, key=lambda found: found[0])[1].give_up()
        return bool(ranked)

    def _refuse(self) -> None:
        refusal = RefusedError("Too many connections; ask again later", 503, kind="server_error", code="overloaded")
        body = json.dumps(refusal.to_dict()).encode()
        head = (
            f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            f"Retry-After: {RETRY_AFTER_S}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class _Timer:
    """Does something once after a time, unless it is stopped before."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], None]) -> None:
        self._loop, self._seconds, self._action = loop, seconds, action
        self._handle: asyncio.TimerHandle | None = None
        self.began_s = loop.time()

    @property
    def runs(self) -> bool:
        """Whether it was started, and neither stopped nor over."""
        return self._handle is not None

    def start(self) -> None:
        """Start it, if it does not run."""
        if self._handle is None:
            self.began_s = self._loop.time()
            self._handle = self._loop.call_later(self._seconds, self._over)

    def stop(self) -> None:
        """Stop it, if it runs."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _over(self) -> None:
        self._handle = None
        self._action()
