"""Who computes for ingestion: the thread that owns the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["ModelOwner", "PieceSpeed", "StoppedError"]

T = TypeVar("T")


class StoppedError(Exception):
    """Background work was told to stop, or what it had planned has changed; it may be begun again."""


class PieceSpeed:
    """How fast pieces of one kind are computed; whoever computes them notes it.

    Attributes
    ----------
    token_s : float or None
        Seconds that a token of the last pieces took; None before the first piece.
    """

    token_s: float | None = None

    def note(self, seconds: float, num_tokens: int) -> None:
        """Note a piece; the later ones count more."""
        token_s = seconds / num_tokens
        self.token_s = token_s if self.token_s is None else (self.token_s + token_s) / 2


class ModelOwner(Protocol):
    """Takes forwards of ingestion and computes them when requests leave time for it."""

    def run(self, work: Callable[[], T], num_tokens: int = 0, stopped: Callable[[], bool] = ...) -> T:
        """Wait until it is ingestion's turn, have the thread that owns the model compute, and return the result.

        Parameters
        ----------
        work : callable
            Computes one piece. What it raises is raised here.
        num_tokens : int
            Tokens that it computes, for the measurement of the machine's speed; 0 if that says nothing.
        stopped : callable
            Says whether to give up waiting.

        Raises
        ------
        StoppedError
            If it does.
        """

    def piece_tokens(self, most: int, speed: PieceSpeed | None = None) -> int:
        """Return how many tokens a piece of a speed may compute now, at most `most`: few while requests are about."""
