"""A server in a thread of its own, on a port that is free."""

from __future__ import annotations

import asyncio
import faulthandler
import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from waiting import wait_until

from fused_kv_llm.server import ServerConfig
from fused_kv_llm.server.connections import listening_options

_SHUTDOWN_S = 120


@contextmanager
def running(app: FastAPI, config: ServerConfig | None = None) -> Iterator[str]:
    """Serve an application, with the limits of a configuration on its connections, and give its URL."""
    options = listening_options(app, config or ServerConfig(), port=0, log_config=None, log_level="critical")
    server = uvicorn.Server(options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(_SHUTDOWN_S)
        if thread.is_alive():
            left = _what_is_left(server)
            server.force_exit = True
            thread.join(_SHUTDOWN_S)
            raise AssertionError(f"The server does not end. {left}")


def _what_is_left(server: uvicorn.Server) -> str:
    """Return what a server waits for, and write the stacks of all threads to stderr."""
    faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
    state = server.server_state
    stacks = io.StringIO()
    # Those of requests, and those of the server itself, which may wait for its application's end.
    for task in asyncio.all_tasks(server.servers[0].get_loop()):
        task.print_stack(file=stacks)
    connections = list(state.connections)
    told = [(one.conn.our_state, one.conn.their_state, (one.scope or {}).get("path")) for one in connections]
    return f"Connections: {told}\nTasks:\n{stacks.getvalue()}"


def events(text: str) -> list[Any]:
    """Return the events of a stream, of which the last one is [DONE]."""
    lines = text.split("\n\n")
    assert lines[-1] == ""
    assert all(line.startswith("data: ") and "\n" not in line for line in lines[:-1])
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
