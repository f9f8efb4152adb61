"""Servers that tests start: Redis or Valkey from the system's packages, moto's S3; skipped where not installed.

With ``FUSED_KV_REQUIRE_SERVICES=1`` (``make test-services``) a server that is missing is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fused_kv_llm.store import KVStore
from fused_kv_llm.store.remote.tier import RemoteTier, open_remote

_START_S = 60.0


def missing(what: str) -> NoReturn:
    """Skip a test that needs a server, or fail if servers are required."""
    if os.environ.get("FUSED_KV_REQUIRE_SERVICES") == "1":
        pytest.fail(f"{what}; FUSED_KV_REQUIRE_SERVICES=1 asks for it")
    pytest.skip(what)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(command: Sequence[str], port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block; wait until it answers."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"{command[0]} did not start")
                time.sleep(0.05)
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def redis_server(*options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Start Redis or Valkey and give its URL and process."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        missing("neither redis-server nor valkey-server is installed (Debian: apt-get install redis-server)")
    if importlib.util.find_spec("redis") is None:
        missing("the package redis is not installed (pip install 'fused-kv-llm[redis]')")
    port = free_port()
    about = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", *options]
    with server([program, *about], port) as process:
        yield f"redis://127.0.0.1:{port}/0", process


@contextmanager
def s3_server() -> Iterator[str]:
    """Start moto's S3 server and give its address."""
    for package in ("s3fs", "moto", "flask", "flask_cors"):
        if importlib.util.find_spec(package) is None:
            missing(f"the package {package} is not installed (pip install 'fused-kv-llm[s3]' 'moto[server]')")
    port = free_port()
    with server([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        yield f"http://127.0.0.1:{port}"


@dataclass
class Remote:
    """Where a remote tier is, and the arguments that open it."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)

    def open(self) -> RemoteTier:
        return open_remote(self.url, self.options)

    def store(self, kv_dir: Path, **options: Any) -> KVStore:
        return KVStore(kv_dir, remote=self.url, remote_options=self.options, **options)
