"""What a benchmark ran on: every result carries it."""

from __future__ import annotations

import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = ["environment", "peak_rss_bytes", "reset_peak_rss"]


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout, through PYTHONPATH
        return None


def environment() -> dict[str, Any]:
    """Return machine, versions and the command line."""
    packages = ("torch", "transformers", "fused-kv-llm", "safetensors", "tokenizers", "triton")
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "command": "python " + " ".join(sys.argv),
    }


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def reset_peak_rss() -> int:
    """Forget the highest resident size so far and return the present one, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def peak_rss_bytes() -> int:
    """Return the highest resident size since :func:`reset_peak_rss`, in bytes."""
    return _status_bytes("VmHWM")
