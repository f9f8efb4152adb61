"""A real file system of three megabytes: full, then emptied, then full again."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
sys.path[:0] = sys.argv[2:]
from conftest import build_chunk
from fused_kv_llm.errors import StoreFullError
from fused_kv_llm.store import KVStore

chunks = [build_chunk(seed, tokens=200, dim=16) for seed in range(60)]
with KVStore(sys.argv[1], memory_bytes=0) as store:
    for attempt in range(3):
        stored = 0
        try:
            for chunk in chunks:
                chunk.put(store)
                stored += 1
            raise SystemExit("the disk is never full")
        except StoreFullError as error:
            assert "no room" in str(error), error
        # Nothing is damaged, nothing half there, and all of it can be read.
        assert stored > 5, stored
        assert store.check().findings == [], store.check().findings
        for chunk in chunks[:stored]:
            with chunk.open(store) as found:
                assert found.read_layers(0, 3)[0].equal(chunk.kv.keys)
        # Ingestion goes on where it stopped as soon as there is room.
        assert store.delete([chunk.key for chunk in chunks[:5]]) == 5
        assert all(chunk.put(store) > 0 for chunk in chunks[:3])
        store.delete([chunk.key for chunk in chunks[:stored]])
print("fine")
"""

FILL_PROGRAM = """
import os
import subprocess
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from conftest import build_chunk
from fused_kv_llm.errors import IndexDamagedError, StoreFullError, StoreUnavailableError
from fused_kv_llm.store import KVStore

kv_dir = Path(sys.argv[1])
chunks = [build_chunk(seed, tokens=50, dim=16) for seed in range(5)]
with KVStore(kv_dir) as store:
    for chunk in chunks:
        chunk.put(store)
filler = os.open(kv_dir.parent / "filler", os.O_WRONLY | os.O_CREAT)
for size in (65536, 1):
    try:
        while True:
            os.write(filler, bytes(size))
    except OSError:
        pass
index = (kv_dir / "index.sqlite").read_bytes()
for read_only in (False, True):
    try:
        KVStore(kv_dir, read_only=read_only).close()
        raise SystemExit("opened without room for the index's shared memory")
    except (StoreFullError, StoreUnavailableError) as error:
        assert not isinstance(error, IndexDamagedError), error
        assert "check --fix" not in str(error) and "damaged" not in str(error), error
        assert "full" in str(error) or "no room" in str(error), error
program = "from fused_kv_llm.cli import app; app()"
command = [sys.executable, "-c", program, "store", "check", "--fix", "--kv-dir", str(kv_dir)]
done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)})
assert done.returncode == 1, done.stdout + done.stderr
assert "moved" not in done.stderr and not list((kv_dir / "quarantine").iterdir()), done.stderr
assert (kv_dir / "index.sqlite").read_bytes() == index
os.ftruncate(filler, 0)
with KVStore(kv_dir) as store:
    assert store.check().findings == []
    assert store.stats().chunks == 5
print("fine")
"""


@pytest.mark.parametrize("program", [PROGRAM, FILL_PROGRAM], ids=["while writing", "when opened"])
def test_a_disk_that_is_really_full(tmp_path, program):
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed, so no small file system can be mounted (Debian: util-linux)")
    folder = tmp_path / "small"
    folder.mkdir()
    own = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    mount = f'mount -t tmpfs -o size=3m none "{folder}"'
    if subprocess.run([*own, mount], capture_output=True, check=False).returncode:
        pytest.skip("this system does not let a test mount a small file system (unshare --user --mount)")
    paths = [str(Path(__file__).parent), *sys.path]
    done = subprocess.run(
        [*own, f'{mount} && exec "$@"', "sh", sys.executable, "-c", program, str(folder / "kv"), *paths],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout == "fine\n", done.stdout + done.stderr
