"""The passages beside a KV store, and the FAISS index over them.

``kv_dir/passages.jsonl`` holds the passages, ``kv_dir/faiss/index.faiss`` their vectors in the same order,
and ``kv_dir/faiss/corpus.json`` what belongs to both. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from fused_kv_llm.demo.passages import FoundPassage, Passage
from fused_kv_llm.errors import CorpusError, FusedKVWarning, MissingExtraError, StoreUnavailableError
from fused_kv_llm.offline import corpus_vectors
from fused_kv_llm.paths import write_atomically

__all__ = ["CorpusInfo", "Embedder", "PassageIndex"]


class Embedder(Protocol):
    """Turns texts into unit vectors; :class:`fused_kv_llm.demo.embedder.MiniLM` is one."""

    name: str

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return one unit vector per text, ``[texts, dimensions]``."""


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """How a corpus was ingested.

    Parameters
    ----------
    embedder : str
        Which embedder made the vectors.
    passages_sha256 : str
        Digest of ``passages.jsonl``, which ties the vectors to it.
    options : dict
        Options of the engine on which the stored KV depends.
    """

    embedder: str
    passages_sha256: str
    options: dict[str, Any]


class PassageIndex:
    """The passages of one corpus, searchable by meaning.

    Parameters
    ----------
    passages : sequence of Passage
    vectors : numpy.ndarray
        ``[passages, dimensions]`` float32, unit length.
    info : CorpusInfo
    embedder : Embedder
    """

    def __init__(
        self, passages: Sequence[Passage], vectors: NDArray[np.float32], info: CorpusInfo, embedder: Embedder
    ) -> None:
        self.passages = list(passages)
        self.info = info
        self._embedder = embedder
        self._index = _faiss().IndexFlatIP(vectors.shape[1])
        self._index.add(vectors)

    @classmethod
    def open(cls, kv_dir: str | Path, embedder: Embedder) -> PassageIndex:
        """Open the index beside a KV store.

        Raises
        ------
        CorpusError
            If nothing was ingested there, or the files do not belong together.
        StoreUnavailableError
            If `kv_dir` is not a folder.
        """
        folder = Path(kv_dir)
        if folder.exists() and not folder.is_dir():
            raise StoreUnavailableError(f"kv_dir={str(folder)!r} is a file; give the folder of a KV store")
        try:
            lines = (folder / "passages.jsonl").read_bytes()
            info = CorpusInfo(**json.loads((folder / "faiss" / "corpus.json").read_bytes()))
            packed = np.frombuffer((folder / "faiss" / "index.faiss").read_bytes(), dtype=np.uint8)
            passages = [Passage(**json.loads(line)) for line in lines.splitlines()]
            index = _faiss().deserialize_index(packed)
        except FileNotFoundError as error:
            raise CorpusError(
                f"Nothing has been ingested in {str(folder)!r} yet: run fused-kv ingest FILES --kv-dir {folder}"
            ) from error
        except (ValueError, TypeError, RuntimeError) as error:
            raise CorpusError(_damaged(folder, str(error))) from error
        if info.passages_sha256 != _digest(lines) or index.ntotal != len(passages):
            raise CorpusError(_damaged(folder, "passages and vectors are of different ingestions"))
        if info.embedder != embedder.name:
            raise CorpusError(_damaged(folder, f"its vectors were made by {info.embedder}, not {embedder.name}"))
        return cls(passages, index.reconstruct_n(0, index.ntotal), info, embedder)

    @classmethod
    def update(
        cls,
        kv_dir: str | Path,
        passages: Sequence[Passage],
        *,
        embedder: Embedder,
        **options: Any,
    ) -> PassageIndex:
        """Add passages to the index beside a KV store, or make it; passages of the same files are replaced.

        Parameters
        ----------
        kv_dir : str or Path
        passages : sequence of Passage
            Everything the files now contain.
        embedder : Embedder
        **options
            Options of the engine on which the stored KV depends.

        Returns
        -------
        PassageIndex
            Written to disk.
        """
        folder = Path(kv_dir)
        with FileLock(folder / ".passages.lock"):
            old = cls._open_if_there(folder, embedder)
            sources = {passage.source for passage in passages}
            kept = [passage for passage in old.passages if passage.source not in sources] if old else []
            merged = list({passage.text: passage for passage in [*kept, *passages]}.values())
            lines = b"".join(_line(passage) for passage in merged)
            info = CorpusInfo(embedder.name, _digest(lines), options)
            # Ingestion's second pass asks for the same vectors, so they are remembered where it looks for them.
            vectors = corpus_vectors([passage.text for passage in merged], embedder, folder / "vectors.sqlite")
            made = cls(merged, vectors, info, embedder)
            # A reader between these writes sees digests that differ, never wrong passages.
            write_atomically(folder / "faiss" / "index.faiss", _faiss().serialize_index(made._index).tobytes())
            write_atomically(folder / "passages.jsonl", lines)
            write_atomically(folder / "faiss" / "corpus.json", json.dumps(asdict(info), indent=1).encode())
        return made

    @classmethod
    def _open_if_there(cls, folder: Path, embedder: Embedder) -> PassageIndex | None:
        if not (folder / "faiss" / "corpus.json").exists():
            return None
        try:
            return cls.open(folder, embedder)
        except CorpusError as error:
            warnings.warn(f"{error}. Made anew from the files given now.", FusedKVWarning, stacklevel=3)
            return None

    def search(self, query: str, k: int) -> list[FoundPassage]:
        """Return the `k` passages nearest in meaning to a query with their scores, best first."""
        wanted = min(k, len(self.passages))
        scores, rows = self._index.search(self._embedder.encode([query]), wanted)
        found = [(self.passages[row], float(score)) for row, score in zip(rows[0], scores[0], strict=True)]
        return [FoundPassage(passage.text, passage.source, round(score, 4)) for passage, score in found]


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise MissingExtraError("faiss-cpu", "demo") from error
    return faiss


def _line(passage: Passage) -> bytes:
    return json.dumps(asdict(passage), ensure_ascii=False).encode() + b"\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _damaged(folder: Path, reason: str) -> str:
    return f"The passage index in {str(folder)!r} cannot be used ({reason}): run fused-kv ingest again"
