"""Ray on this machine with the serving application on it, for tests and benchmarks, and its replicas' processes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["replica_pids", "serving"]

_OBJECT_STORE_BYTES = 200 * 2**20
# Where other work has the cores, Ray's own processes answer late, and are not to be taken for dead.
_PATIENT = {
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "20",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "600",
}


@contextmanager
def serving(options: Mapping[str, Any], cpus: int = 2) -> Iterator[str]:
    """Run the application of ``fused_kv_llm.scale`` on a Ray of its own; give its URL when chunks are known.

    Parameters
    ----------
    options : mapping
        Of ``build_app``.
    cpus : int
        Cores that Ray may give away.
    """
    os.environ.update({name: value for name, value in _PATIENT.items() if name not in os.environ})
    import ray
    from ray import serve

    from fused_kv_llm.scale import build_app

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(num_cpus=cpus, object_store_memory=_OBJECT_STORE_BYTES, **quiet)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(options), name="fused-kv")
        # The gateway asks for stored chunks at once, and again after each period.
        time.sleep(2.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def replica_pids() -> list[int]:
    """Return the replicas' processes, of those that descend from this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_replica = b"ServeReplica:fused-kv:replica" in (folder / "cmdline").read_bytes()
            if is_replica and os.getpid() in _ancestors(int(folder.name)):
                found.append(int(folder.name))
        except OSError:
            continue  # it has ended meanwhile
    return sorted(found)


def _ancestors(pid: int) -> set[int]:
    found: set[int] = set()
    while pid > 1:
        # The second field is a name in brackets, which may have spaces in it.
        pid = int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
        found.add(pid)
    return found
