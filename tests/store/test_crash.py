"""A writer that is killed at any moment leaves no damage and loses nothing that it had finished."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KILLS = 1000 if os.environ.get("FUSED_KV_STRESS") == "1" else 200


@pytest.mark.heavy
def test_kills_at_any_moment(tmp_path):
    program = Path(__file__).parent / "crashing.py"
    paths = [str(program.parent), *sys.path]
    code = f"import runpy, sys; sys.path[:0] = {paths!r}; runpy.run_path({str(program)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path / "kv"), str(KILLS), "7"],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills, verified, found = done.stdout.split(maxsplit=2)
    assert int(kills) == KILLS
    assert int(verified) > 5 * KILLS
    # A file without its row, a row without its file (eviction), a temporary file: never damage.
    assert set(json.loads(found)) <= {"orphaned", "missing", "temporary"}
