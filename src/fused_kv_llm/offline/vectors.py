"""The vectors of a corpus, remembered beside the store so that adding a chunk embeds one text, not all."""

from __future__ import annotations

import hashlib
import sqlite3
import warnings
from collections.abc import Callable, Container, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fused_kv_llm.errors import FusedKVWarning

from .embedder import Embedder

__all__ = ["TEXTS_AT_ONCE", "VECTORS_FILE", "corpus_vectors", "keep_vectors", "unknown_texts"]

VECTORS_FILE = "vectors.sqlite"
"""Name of the file beside the store."""

TEXTS_AT_ONCE = 16
"""Texts that an embedder gets at once: together with others, a text may get a vector with other last digits."""

_ROWS_AT_ONCE = 256
_BUSY_S = 30.0


def corpus_vectors(
    texts: Sequence[str],
    embedder: Embedder,
    path: Path | None,
    wait: Callable[[], None] = lambda: None,
    *,
    tenant: str = "",
) -> NDArray[np.float32]:
    """Return one unit vector per text.

    Parameters
    ----------
    texts : sequence of str
        Distinct.
    embedder : Embedder
        Embeds those that are not remembered.
    path : Path or None
        The SQLite file that remembers vectors; None remembers nothing. A file that cannot be used is passed
        over with a warning: vectors can always be made again.
    wait : callable
        Called before each small batch is embedded; may wait, or raise to give up.
    tenant : str
        Vectors are remembered for each tenant apart: how soon they come would tell what others have embedded.

    Returns
    -------
    numpy.ndarray
        ``[texts, dimensions]`` float32.
    """
    digests = _digests(texts, embedder, tenant)
    known = _recall(digests, path)
    missing = _missing(texts, digests, known)
    for begin in range(0, len(missing), TEXTS_AT_ONCE):
        wait()
        batch = missing[begin : begin + TEXTS_AT_ONCE]
        made = embedder.encode([texts[i] for i in batch])
        fresh = {digests[i]: vector for i, vector in zip(batch, made, strict=True)}
        _remember(fresh, path)
        known.update(fresh)
    return np.stack([known[digest] for digest in digests]) if texts else np.zeros((0, 1), np.float32)


def unknown_texts(texts: Sequence[str], embedder: Embedder, path: Path, *, tenant: str = "") -> list[str]:
    """Return those of some distinct texts whose vectors are not remembered, in the order in which they are embedded."""
    digests = _digests(texts, embedder, tenant)
    return [texts[i] for i in _missing(texts, digests, _recall(digests, path))]


def keep_vectors(
    texts: Sequence[str], vectors: NDArray[np.float32], embedder: Embedder, path: Path, *, tenant: str = ""
) -> None:
    """Remember vectors that were made elsewhere.

    Parameters
    ----------
    texts : sequence of str
    vectors : numpy.ndarray
        ``[texts, dimensions]`` float32, of unit length.
    embedder : Embedder
        Whose vectors they are.
    path : Path
    tenant : str
    """
    _remember(dict(zip(_digests(texts, embedder, tenant), vectors, strict=True)), path)


def _missing(texts: Sequence[str], digests: Sequence[bytes], known: Container[bytes]) -> list[int]:
    """Return which texts are not known.

    They are ordered by what they are, so that the same texts get the same vectors in whatever order they are given; and
    by length, since short texts beside a long one take as long as it.
    """
    missing = (i for i, digest in enumerate(digests) if digest not in known)
    return sorted(missing, key=lambda i: (len(texts[i]), digests[i]))


def _digests(texts: Sequence[str], embedder: Embedder, tenant: str) -> list[bytes]:
    # Nothing is added without a tenant, so that vectors of earlier releases are found.
    salt = f"{embedder.name}\0" if not tenant else f"{embedder.name}\0{len(tenant)}\0{tenant}\0"
    return [hashlib.sha256(f"{salt}{text}".encode("utf-8", "surrogatepass")).digest() for text in texts]


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_S)
    path.chmod(0o600)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(
        "CREATE TABLE IF NOT EXISTS vectors (digest BLOB PRIMARY KEY, vector BLOB NOT NULL) WITHOUT ROWID"
    )
    return connection


def _recall(digests: Sequence[bytes], path: Path | None) -> dict[bytes, NDArray[np.float32]]:
    if path is None or not path.exists():
        return {}
    found: dict[bytes, NDArray[np.float32]] = {}
    try:
        with closing(_connect(path)) as connection:
            for begin in range(0, len(digests), _ROWS_AT_ONCE):
                batch = digests[begin : begin + _ROWS_AT_ONCE]
                marks = ",".join("?" * len(batch))
                rows = connection.execute(f"SELECT digest, vector FROM vectors WHERE digest IN ({marks})", batch)
                found.update((digest, np.frombuffer(vector, np.float32)) for digest, vector in rows)
    except (sqlite3.Error, ValueError, OSError) as error:
        _passed_over(path, error)
        return {}
    return found


def _remember(vectors: dict[bytes, NDArray[np.float32]], path: Path | None) -> None:
    if path is None:
        return
    try:
        with closing(_connect(path)) as connection, connection:
            connection.executemany(
                "INSERT OR REPLACE INTO vectors VALUES (?, ?)",
                [(digest, vector.astype(np.float32).tobytes()) for digest, vector in vectors.items()],
            )
    except (sqlite3.Error, OSError) as error:
        _passed_over(path, error)


def _passed_over(path: Path, error: Exception) -> None:
    warnings.warn(
        f"Vectors could not be kept in {path} ({error}): they are made at every ingestion. Delete the file, or check "
        "the folder's permissions.",
        FusedKVWarning,
        stacklevel=4,
    )
