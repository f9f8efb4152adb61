"""Who computes for ingestion: the thread that owns the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

__all__ = ["ModelOwner", "StoppedError"]

T = TypeVar("T")


class StoppedError(Exception):
    """Background work was told to stop, or what it had planned has changed; it may be begun again."""


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

    def piece_tokens(self, most: int) -> int:
        """Return how many tokens a piece may compute now, at most `most`: few while requests are about."""
