"""How every test runs: Triton's interpreter without a CUDA device, wide terminals, no deadline for examples."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

# How long one example takes says what else the machine does.
settings.register_profile("without_deadline", deadline=None)
settings.load_profile("without_deadline")

# Triton reads this when it is first imported, and transformers imports it.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Consoles take their width when they are made, whichever test makes them first; no line is to break there.
os.environ["COLUMNS"] = "200"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that need a CUDA device, unless they are asked for: then they fail without one."""
    if "gpu" in config.getoption("markexpr"):
        return
    chosen = [item for item in items if item.get_closest_marker("gpu") is None]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("gpu")])
        items[:] = chosen
