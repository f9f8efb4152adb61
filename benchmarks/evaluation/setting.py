"""How a set's questions are asked: which ones, with which chunks, in which words, and what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fused_kv_llm import FusedKVEngine

from .articles import join_articles
from .questions import Question, read_corpus, read_questions
from .records import settings_digest

__all__ = ["CORPORA", "Setting"]

CORPORA = ("all", "used", "asked")


@dataclass(frozen=True, slots=True)
class Setting:
    """How the questions of a set are asked.

    Parameters
    ----------
    frame : str
        Wording around the passages.
    passages : int
        Chunks of a prompt.
    order : {"shuffled", "file"}
        Of a prompt's chunks.
    chunk_tokens : int
        Passages of one article are joined until they have about so many tokens; 0 leaves every passage a chunk.
    part : {"all", "dev", "held"}
        Which questions, see :func:`.questions.is_held_back`.
    corpus : {"all", "used", "asked"}
        What is ingested: the passages of the whole set, the chunks that stand in prompts, or these with the context
        shifts that the whole set would give them (:func:`.asked_chunks.preprocess_asked`).
    answer_tokens : int
        Tokens to generate for containment and its kin; 0 measures fidelity only.
    recall : bool
        Whether to select once more at 10% for the recall of gold-answer tokens.
    """

    frame: str = "plain"
    passages: int = 5
    order: str = "shuffled"
    chunk_tokens: int = 0
    part: str = "all"
    corpus: str = "all"
    answer_tokens: int = 0
    recall: bool = False

    def digest(self, data: str, engine: FusedKVEngine) -> str:
        """Return the name under which records are kept; they do not depend on which other questions are asked."""
        joined = {"chunk_tokens": self.chunk_tokens} if self.chunk_tokens else {}
        return settings_digest(
            data=data, model=engine.model_fingerprint, dtype=engine.dtype, frame=self.frame, passages=self.passages,
            corpus=self.corpus, answers=self.answer_tokens, recall=self.recall, order=self.order, **joined,
        )  # fmt: skip

    def questions(self, path: Path, count: int, engine: FusedKVEngine) -> list[Question]:
        """Return the first `count` questions of the part; 0 takes all."""
        chunks = self._chunks(path, engine)
        return read_questions(path, count, self.passages, self.order, part=self.part, chunks=chunks)

    def corpus_texts(self, path: Path, used: list[str], engine: FusedKVEngine) -> list[str]:
        """Return the texts that are ingested."""
        chunks = self._chunks(path, engine)
        texts = used if self.corpus != "all" else chunks.values() if chunks else read_corpus(path)
        return list(dict.fromkeys(text.strip() for text in texts))

    def _chunks(self, path: Path, engine: FusedKVEngine) -> dict[str, str]:
        if not self.chunk_tokens:
            return {}
        return join_articles(path, self.chunk_tokens, lambda text: len(engine.token_ids(text)))
