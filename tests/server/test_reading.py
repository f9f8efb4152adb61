"""Uploads are read in a process with limits: files that are made to do harm end with it, and nothing else does."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest
from server.pdfs import bomb, pdf, shown

from fused_kv_llm.errors import CorpusError
from fused_kv_llm.server.reading import ReadingLimits, read_upload

LIMITS = ReadingLimits(chunk_chars=300, max_pages=50, max_chars=2_000_000)


def read(content: bytes, suffix: str, limits: ReadingLimits = LIMITS) -> list[str]:
    return read_upload(content, suffix, limits, lambda: None)


def test_small_texts_are_split_at_once() -> None:
    assert read("one\n\n\ufefftwo\n\none".encode(), ".md") == ["one\n\n\ufefftwo\n\none"]
    with pytest.raises(CorpusError, match="byte 3"):
        read(b"one\xff", ".txt")
    with pytest.raises(CorpusError, match="no text"):
        read(b" \n ", ".txt")


@pytest.mark.parametrize(
    ("content", "suffix", "told"),
    [
        # 300 MB, which are 300 kB as they come.
        (bomb(300_000_000), ".pdf", "cannot be read|not a readable PDF|memory"),
        (pdf([shown("a")] * 51), ".pdf", "more than 50 pages"),
        (b"%PDF-1.4 and nothing else", ".pdf", "not a readable PDF|cannot be read"),
        (b"a,b\n1," + b"x" * 200_000, ".csv", "not a readable table"),
    ],
)
def test_files_that_cannot_be_read(content: bytes, suffix: str, told: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CorpusError, match=told) as caught:
        read(content, suffix)
    assert "/tmp" not in str(caught.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 50_000


def test_a_million_characters_in_a_line() -> None:
    texts = read(b"x" * 1_000_000, ".txt")
    # Equal chunks count once.
    assert list(map(len, texts)) == [300, 100]


def test_too_much_text() -> None:
    with pytest.raises(CorpusError, match="more than 1,000 characters"):
        read(" ".join(map(str, range(20_000))).encode(), ".txt", ReadingLimits(max_chars=1000))


def test_memory_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The process limits itself before it reads; what it is asked to read takes all that it gets."""
    (tmp_path / "greedy.py").write_text(
        "import sys\nfrom fused_kv_llm.demo import limited_reading, passages\n"
        "def greedy(*_, **__): return bytearray(2**34)\n"
        "def endless(*_, **__):\n    while True: pass\n"
        "passages.read_passages = greedy if 'greedy' in open(sys.argv[1]).read() else endless\n"
        "limited_reading.main()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("fused_kv_llm.server.reading._MODULE", "greedy")
    with pytest.raises(CorpusError, match="more memory than 1024 MiB"):
        read(b"<p>greedy", ".html")
    with pytest.raises(CorpusError, match="within 1 s"):
        read(b"<p>endless", ".html", ReadingLimits(cpu_s=1))
    started = time.monotonic()
    with pytest.raises(CorpusError, match="within"):
        read(b"<p>endless", ".html", ReadingLimits(timeout_s=0.2))
    assert time.monotonic() - started < 5


def test_a_pdf_is_read() -> None:
    assert read(pdf([shown("The Aldebaran has 120 seats."), shown("And a cafe.")]), ".pdf") == [
        "The Aldebaran has 120 seats.\n\nAnd a cafe."
    ]


def test_who_has_left_is_not_read_for() -> None:
    def leave() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        read_upload(b"<p>text", ".html", LIMITS, leave)
