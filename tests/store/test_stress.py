"""Several processes do everything at once; ``make stress`` runs eight of them for five minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from fused_kv_llm.store import KVStore

from .conftest import build_chunk

STRESS = os.environ.get("FUSED_KV_STRESS") == "1"
PROCESSES, SECONDS = (8, 300.0) if STRESS else (4, 6.0)


def test_mixed_load_loses_nothing(tmp_path):
    kv_dir, remote = tmp_path / "kv", tmp_path / "remote"
    program = Path(__file__).parent / "stressing.py"
    paths = [str(program.parent), *sys.path]
    code = f"import runpy, sys; sys.path[:0] = {paths!r}; runpy.run_path({str(program)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code, str(kv_dir), str(remote), str(PROCESSES), str(SECONDS)],
        capture_output=True,
        text=True,
        timeout=SECONDS + 240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == PROCESSES
    counts = {name: sum(r["counts"].get(name, 0) for r in reports) for r in reports for name in r["counts"]}
    print(counts)
    chunks = {chunk.key: chunk for chunk in (build_chunk(number, tokens=4 + number % 13) for number in range(48))}
    put = {key for report in reports for key in report["put"]}
    assert len(put) > 20
    # Nobody damages anything, so nobody may find damage; only what somebody deletes at that moment may be gone.
    deletable = set(list(chunks)[32:])
    notes = [note for report in reports for note in report["noted"]]
    assert [note for note in notes if "any more" not in note or not any(key in note for key in deletable)] == []
    assert counts["damaged"] == len(notes)
    assert counts.get("full", 0) < sum(counts.values()) / 10
    assert counts["promoted"] > 0
    assert counts["demoted"] > 0
    with KVStore(kv_dir, remote=f"file://{remote}") as store:
        assert [f for f in store.check().findings if f.kind != "temporary"] == []
        assert put - store.contains(put) == set()
        for key in put:
            keys, values = chunks[key].open(store).read_layers(0, 3)
            assert keys.equal(chunks[key].kv.keys)
            assert values.equal(chunks[key].kv.values)
