"""Reading and splitting a corpus: files by Ray Data's workers, one file a task; data sets and texts as they are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fused_kv_llm.demo import Passage, find_files, read_file
from fused_kv_llm.errors import ConfigError, CorpusError

from .resources import import_ray, ray_errors, rows_of

__all__ = ["read_corpus", "read_files"]

_LINES = ".jsonl"


def read_corpus(corpus: Any, *, chunk_chars: int, text_column: str) -> list[str]:
    """Return the chunks of a corpus, in its order.

    Parameters
    ----------
    corpus : Path, iterable of Path, iterable of str, or ray.data.Dataset
        Files and folders, which are read and split, on a path that every worker sees; texts, one chunk each; or a data
        set with a column of texts, one chunk each. A ``.jsonl`` file has an object in each line, with a text that is
        one chunk.
    chunk_chars : int
        Longest chunk of a file that is split, in characters.
    text_column : str
        The column, or the field of a line's object.

    Raises
    ------
    ConfigError
        If the column does not exist.
    CorpusError
        If a file does not exist or cannot be read, a data set is empty, or the corpus is something else.
    IngestionFailedError
        If Ray's workers fail.
    """
    ray = import_ray()
    if isinstance(corpus, ray.data.Dataset):
        return _column(corpus, text_column)
    if isinstance(corpus, str):
        raise CorpusError(f"corpus={corpus[:40]!r} is one string: pass a list of chunks, or Path({corpus[:40]!r})")
    if not isinstance(corpus, (Path, Iterable)):
        raise CorpusError(f"corpus is a {type(corpus).__name__}: pass paths, texts, or a ray.data.Dataset")
    items: list[Any] = [corpus] if isinstance(corpus, Path) else list(corpus)
    if not any(isinstance(item, Path) for item in items):
        return items
    if not all(isinstance(item, Path) for item in items):
        raise CorpusError("The corpus has paths and texts: pass one or the other")
    return [passage.text for passage in read_files(items, chunk_chars=chunk_chars, text_column=text_column)]


def _column(dataset: Any, text_column: str) -> list[str]:
    with ray_errors("Reading"):
        schema = dataset.schema()
    if schema is None:
        raise CorpusError("The data set is empty: there is nothing to ingest")
    names = schema.names
    if text_column not in names:
        raise ConfigError(f"text_column={text_column!r} is not in the data set, which has {', '.join(names)}")
    return [row[text_column] for row in rows_of(dataset.select_columns([text_column]), "Reading")]


def read_files(paths: Sequence[Path], *, chunk_chars: int, text_column: str = "text") -> list[Passage]:
    """Return the chunks of files, each with its file; takes and raises what :func:`read_corpus` does."""
    ray = import_ray()
    files = [
        file
        for path in paths
        for file in ([path] if path.suffix.lower() == _LINES and path.is_file() else find_files([path]))
    ]
    rows = [
        {"number": number, "file": str(file.absolute()), "named": file in paths} for number, file in enumerate(files)
    ]
    if not rows:
        raise CorpusError(f"No files in {', '.join(map(str, paths))}")

    def read(row: dict[str, Any]) -> dict[str, Any]:
        return {"number": row["number"], **_read(Path(row["file"]), chunk_chars, text_column, named=row["named"])}

    dataset = ray.data.from_items(rows, override_num_blocks=min(len(rows), 1000)).map(read)
    dataset.set_name("fused-kv-read")
    found = sorted(rows_of(dataset, "Reading"), key=lambda row: int(row["number"]))
    for row in found:
        if row["error"]:
            raise CorpusError(row["error"])
    return [Passage(text, str(files[int(row["number"])])) for row in found for text in json.loads(row["texts"])]


def _read(file: Path, chunk_chars: int, text_column: str, *, named: bool) -> dict[str, str]:
    """Return a file's chunks as JSON, or what is wrong with it: an exception would end the whole run as Ray's own."""
    try:
        if file.suffix.lower() == _LINES:
            texts = [_text_of(line, number, file, text_column) for number, line in enumerate(_lines(file), 1) if line]
        else:
            texts = read_file(file, chunk_chars, named=named)
    except CorpusError as error:
        return {"texts": "[]", "error": str(error)}
    return {"texts": json.dumps(texts), "error": ""}


def _lines(file: Path) -> list[str]:
    try:
        return [line.strip() for line in file.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{str(file)!r} cannot be read: {error}") from error


def _text_of(line: str, number: int, file: Path, text_column: str) -> str:
    try:
        text = json.loads(line)[text_column]
    except (ValueError, KeyError, TypeError) as error:
        raise CorpusError(
            f"Line {number} of {str(file)!r} is not a JSON object with a text in {text_column!r} ({error!r})"
        ) from error
    if not isinstance(text, str):
        raise CorpusError(f"Line {number} of {str(file)!r} has a {type(text).__name__} in {text_column!r}, not a text")
    return text
