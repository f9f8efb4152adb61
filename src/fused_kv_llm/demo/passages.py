"""From files and folders to passages."""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from fused_kv_llm.demo.plain_text import csv_text, html_text
from fused_kv_llm.errors import ConfigError, CorpusError, FusedKVWarning, MissingExtraError

__all__ = ["SUFFIXES", "FoundPassage", "Passage", "find_files", "read_file", "read_passages", "split_text"]

SUFFIXES = (".txt", ".md", ".pdf", ".csv", ".html", ".htm")
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")
_MIN_CHUNK_CHARS = 100
_TO_PLAIN = {".csv": csv_text, ".html": html_text, ".htm": html_text}


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrieval unit.

    Parameters
    ----------
    text : str
        Stripped.
    source : str
        The file it comes from.
    """

    text: str
    source: str


@dataclass(frozen=True, slots=True)
class FoundPassage(Passage):
    """A passage that a search has found.

    Parameters
    ----------
    score : float
        Cosine of the angle between its vector and the query's.
    """

    score: float


def read_passages(
    paths: Iterable[str | Path], *, chunk_chars: int = 1000, max_pages: int | None = None
) -> list[Passage]:
    """Read files and folders and split them into passages.

    Parameters
    ----------
    paths : iterable of str or Path
        Files of type ``.txt``, ``.md``, ``.pdf``, ``.csv`` or ``.html``, and folders, which are searched recursively
        for them; hidden files and folders are left out.
    chunk_chars : int
        Longest passage, in characters.
    max_pages : int or None
        PDFs with more pages cannot be read; None sets no limit.

    Returns
    -------
    list of Passage
        In the order of the paths, folders sorted by name; equal texts once.

    Raises
    ------
    CorpusError
        If a path does not exist, a file named directly cannot be read, or no text is found at all. A file
        inside a folder that cannot be read is skipped with a warning.
    ConfigError
        If `chunk_chars` is too small.
    MissingExtraError
        If a PDF is among the files and ``pypdf`` is not installed.
    """
    if chunk_chars < _MIN_CHUNK_CHARS:
        raise ConfigError(f"chunk_chars={chunk_chars} is too small to be worth storing: use 100 or more")
    named = [Path(path) for path in paths]
    passages: dict[str, Passage] = {}
    for file in find_files(named):
        for text in read_file(file, chunk_chars, max_pages, named=file in named):
            passages.setdefault(text, Passage(text, str(file)))
    if not passages:
        places = ", ".join(map(str, named)) or "nothing"
        raise CorpusError(f"No text in {places}: expected files of type {', '.join(SUFFIXES)}")
    return list(passages.values())


def read_file(file: Path, chunk_chars: int, max_pages: int | None = None, *, named: bool = True) -> list[str]:
    """Read one file and split it; as :func:`read_passages`, but that equal texts are there as often as they are.

    Parameters
    ----------
    file : Path
    chunk_chars : int
    max_pages : int or None
    named : bool
        Whether somebody named the file, so that it is an error if it cannot be read.
    """
    return split_text(_read(file, max_pages, named=named), chunk_chars)


def split_text(text: str, chunk_chars: int) -> list[str]:
    """Split a text at blank lines into passages of at most `chunk_chars` characters.

    Neighbouring short paragraphs are packed together; a paragraph that is too long is split at line ends,
    sentences or spaces.
    """
    passages: list[str] = []
    for paragraph in _BLANK_LINES.split(text):
        stripped = paragraph.strip()
        pieces = [stripped] if len(stripped) <= chunk_chars else _split_long(stripped, chunk_chars)
        for piece in filter(None, pieces):
            if passages and len(passages[-1]) + 2 + len(piece) <= chunk_chars:
                passages[-1] += "\n\n" + piece
            else:
                passages.append(piece)
    return passages


def _split_long(paragraph: str, chunk_chars: int) -> list[str]:
    try:
        from langchain_text_splitters import RecursiveCharacterTextSplitter
    except ImportError as error:
        raise MissingExtraError("langchain-text-splitters", "demo") from error
    splitter = RecursiveCharacterTextSplitter(
        chunk_size=chunk_chars, chunk_overlap=0, separators=["\n", ". ", " ", ""], keep_separator="end"
    )
    return [piece.strip() for piece in splitter.split_text(paragraph)]


def find_files(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield files, and those in folders that can be read, in the order of :func:`read_passages`."""
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if _is_wanted(file, path))
        elif not path.exists():
            raise CorpusError(f"There is no file or folder {str(path)!r}")
        elif path.suffix.lower() not in SUFFIXES:
            raise CorpusError(f"Cannot read {str(path)!r}: expected a file of type {', '.join(SUFFIXES)}")
        else:
            yield path


def _is_wanted(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
    return not hidden and file.suffix.lower() in SUFFIXES and file.is_file()


def _read(file: Path, max_pages: int | None, *, named: bool) -> str:
    try:
        if file.suffix.lower() == ".pdf":
            return _read_pdf(file, max_pages)
        text = file.read_text(encoding="utf-8-sig")
        return _TO_PLAIN.get(file.suffix.lower(), str)(text)
    except MissingExtraError:
        raise
    except UnicodeDecodeError as error:
        problem = f"{str(file)!r} is not UTF-8 text ({error.reason} at byte {error.start}): convert it"
    except OSError as error:
        problem = f"{str(file)!r} cannot be read: {error.strerror or error}"
    except csv.Error as error:
        problem = f"{str(file)!r} is not a readable table: {error}"
    except _PdfReadError as error:
        problem = f"{str(file)!r} is not a readable PDF: {error}"
    if named:
        raise CorpusError(problem)
    warnings.warn(f"Skipped: {problem}", FusedKVWarning, stacklevel=2)
    return ""


class _PdfReadError(Exception):
    """A PDF that pypdf cannot read."""


def _read_pdf(file: Path, max_pages: int | None) -> str:
    try:
        from pypdf import PdfReader
        from pypdf.errors import PyPdfError
    except ImportError as error:
        raise MissingExtraError("pypdf", "demo") from error
    try:
        texts: list[str] = []
        reader = PdfReader(file)
        # What a file says of itself is no more than that, so the pages are counted as well.
        claimed = len(reader.pages)
        for page in reader.pages:
            if max_pages is not None and max(claimed, len(texts) + 1) > max_pages:
                raise _PdfReadError(f"it has more than {max_pages} pages")
            texts.append(page.extract_text())
        return "\n\n".join(texts)
    except PyPdfError as error:
        raise _PdfReadError(str(error) or type(error).__name__) from error
