"""Pieces of ingestion that do not depend on how fast the machine is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fused_kv_llm.model import ModelOwner, PieceSpeed

__all__ = ["FixedPieces"]

T = TypeVar("T")


class FixedPieces:
    """A model's owner whose pieces have always the same number of tokens.

    The last bits of a chunk's KV depend on what else is in its forward. With fixed pieces the same new texts are
    computed in the same forwards, and give the same bytes.

    Parameters
    ----------
    owner : ModelOwner
        Computes the pieces.
    tokens : int
        Most tokens of a piece.
    """

    def __init__(self, owner: ModelOwner, tokens: int) -> None:
        self._owner, self._tokens = owner, tokens

    def run(self, work: Callable[[], T], num_tokens: int = 0, stopped: Callable[[], bool] = lambda: False) -> T:
        """Wait for the owner's turn and compute; as the owner does."""
        return self._owner.run(work, num_tokens, stopped)

    def piece_tokens(self, most: int, speed: PieceSpeed | None = None) -> int:
        """Return how many tokens a piece may compute: at most `most`, whatever the time."""
        return min(most, self._tokens)
