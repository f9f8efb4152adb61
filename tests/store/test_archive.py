"""Archives that were made to harm: every one is refused with an error that says so, in finite time."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store import KVStore

MEMBER = f"{'ab' * 32}.safetensors"

LOAD = """
import sys
from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store import KVStore

with KVStore(sys.argv[1]) as store:
    try:
        store.archive.load(sys.argv[2])
    except StoreUnavailableError as error:
        print("refused:", error)
"""


def header(name: str, *, size: int = 0, kind: bytes = b"0", forged_size: int | None = None) -> bytes:
    """Return a member's header block; ``forged_size`` is written as tar writes numbers that are negative or huge."""
    info = tarfile.TarInfo(name)
    info.size = size
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    block[156:157] = kind
    if forged_size is not None:
        mark = b"\xff" if forged_size < 0 else b"\x80"
        block[124:136] = mark + forged_size.to_bytes(11, "big", signed=True)
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def pax(record: bytes) -> bytes:
    """Return an extended header of one record, ``key=value``, for the member after it."""
    length = len(record) + 2
    length += len(str(length + len(str(length))))
    body = b"%d %s\n" % (length, record)
    return header("pax", size=len(body), kind=b"x") + body.ljust(512, b"\0")


END = bytes(10240)
LOOPS = {
    "first again": header("a") + header("b") + header(MEMBER, forged_size=-1024) + END,
    "itself again": header("a") + header(MEMBER, forged_size=-512) + END,
    "pax": header("a") + pax(b"size=-1024") + header(MEMBER) + END,
}
BROKEN = {
    "huge": header(MEMBER, forged_size=2**80) + END,
    "pax size": pax(b"size=9" + b"9" * 30) + header(MEMBER) + END,
    "sparse map": pax(b"GNU.sparse.map=a,b") + header(MEMBER, size=512) + bytes(512) + END,
    "sparse size": pax(b"GNU.sparse.realsize=zz") + header(MEMBER, size=512) + bytes(512) + END,
    "long name": header("x", kind=b"L", forged_size=2**62) + END,
    "headers without end": pax(b"a=b") * 2000 + header(MEMBER) + END,
}


@pytest.mark.parametrize("data", LOOPS.values(), ids=LOOPS.keys())
def test_negative_sizes_do_not_go_round_for_ever(tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "bad.tar"
    archive.write_bytes(data)
    # In a process of its own, which can be ended.
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "kv"), str(archive)],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("refused: The archive")


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_broken_headers_are_refused(store: KVStore, tmp_path: Path, data: bytes) -> None:
    archive = tmp_path / "bad.tar"
    archive.write_bytes(data)
    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        store.archive.load(archive)


def test_what_came_before_a_broken_header_is_kept(store: KVStore, tmp_path: Path, make_chunk) -> None:
    good, chunk = tmp_path / "good.tar", make_chunk()
    with KVStore(tmp_path / "source") as source:
        chunk.put(source)
        source.archive.export(good)
    with tarfile.open(good) as archive:
        archive.getmembers()
        end = archive.offset
    bad = tmp_path / "bad.tar"
    bad.write_bytes(good.read_bytes()[:end] + BROKEN["huge"])
    with pytest.raises(StoreUnavailableError, match="cannot be read"):
        store.archive.load(bad)
    assert store.contains([chunk.key]) == {chunk.key}
