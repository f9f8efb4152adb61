"""Ingestion beside requests: its forwards come in pieces, between the steps, and get about three fifths of the time.

A piece is a batch of chunks. The thread that ingests hands it to the thread that owns the model and waits. While
requests are about, pieces are as short as a chunk allows, so that nobody waits long for the end of one. A request that
is about to get its first token goes before the next piece; what ingestion missed by that, it gets while answers are
being written, one piece between two tokens.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from typing import Any, Generic, TypeVar

from fused_kv_llm.errors import EngineClosedError
from fused_kv_llm.model import PieceSpeed, StoppedError

__all__ = ["IngestionPieces", "Piece"]

T = TypeVar("T")

_POLL_S = 0.05
# Seconds that a piece is meant to take: while requests are about, and when there were none for some time.
_BESIDE_S, _ALONE_S, _ABOUT_S = 0.1, 0.5, 10.0
# Before it is known how fast the machine is.
_FIRST_TOKENS = 256
# Who has just got an answer often asks again at once.
_GRACE_S = 0.01
# A request whose chunks are being opened is about to be fused, unless that takes longer.
_LOADING_S = 0.1
# So many seconds are owed to ingestion for each one that requests had. Its short pieces compute fewer tokens a second
# than the long ones that it has alone: this is about half of its speed.
_OWED_SHARE = 1.5
# So much is owed to ingestion at most; then a piece goes before requests that are being fused, too.
_OWED_S = 1.0


class Piece(Generic[T]):
    """A forward of ingestion, and who waits for it.

    Parameters
    ----------
    work : callable
        Computes it; called by the thread that owns the model.
    num_tokens : int
        Tokens that it computes; 0 leaves it out of the measurement of the machine's speed.
    """

    def __init__(self, work: Callable[[], T], num_tokens: int) -> None:
        self._work, self._future = work, Future[T]()
        self.num_tokens = num_tokens

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for it still."""
        return not self._future.cancelled()

    def compute(self) -> None:
        """Compute it, and wake up who waits for it."""
        if self._future.set_running_or_notify_cancel():
            try:
                self._future.set_result(self._work())
            except BaseException as error:
                self._future.set_exception(error)

    def refuse(self) -> None:
        """Let it never be computed; who waits for it is told."""
        if self._future.cancel():
            self._future.set_running_or_notify_cancel()

    def result(self, stopped: Callable[[], bool]) -> T:
        """Wait until it was computed, and return what came of it.

        A piece that has begun is waited for. Only Ctrl-C, or another exception in the thread that waits, leaves it.

        Parameters
        ----------
        stopped : callable
            Says whether to give up a piece that has not begun.

        Raises
        ------
        StoppedError
            If it does.
        EngineClosedError
            If the process ends.
        """
        try:
            while not wait((self._future,), _POLL_S).done:
                if stopped() and self._future.cancel():
                    raise StoppedError
            return self._future.result()
        except CancelledError:
            raise EngineClosedError("The process ends: the next ingestion goes on from here.") from None
        finally:
            self._future.cancel()


class IngestionPieces:
    """The pieces that wait, and when the next one is due. Used by the thread that owns the model.

    Parameters
    ----------
    clock : callable or None
        Seconds of any beginning: ``time.perf_counter``, if None.

    Attributes
    ----------
    is_over : bool
        Whether no more are taken, since the process ends.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or time.perf_counter
        self.is_over = False
        self._waiting: deque[Piece[Any]] = deque()
        self._speed = PieceSpeed()
        self._owed_s, self._is_beside = 0.0, False
        self._request_s, self._loading_s, self._wanted_s = float("-inf"), float("inf"), float("-inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def piece_tokens(self, most: int, speed: PieceSpeed | None = None) -> int:
        """Return how many tokens the next piece of a speed may compute, at most `most`; any thread may ask."""
        # Before the first piece of its kind, the usual speed is the best guess.
        token_s = (speed.token_s if speed else None) or self._speed.token_s
        if token_s is None:
            return min(most, _FIRST_TOKENS)
        about = self._clock() - self._request_s < _ABOUT_S
        return max(1, min(most, int((_BESIDE_S if about else _ALONE_S) / token_s)))

    def add(self, piece: Piece[Any]) -> None:
        """Take a piece."""
        if self.is_over:
            piece.refuse()
        else:
            self._waiting.append(piece)

    def end(self) -> None:
        """Refuse those that wait and all that come."""
        self.is_over = True
        while self._waiting:
            self._waiting.popleft().refuse()

    def requests_had(self, seconds: float) -> None:
        """Note that requests are there and had a step of so many seconds, for which ingestion is owed some."""
        self._request_s = now_s = self._clock()
        if self._waiting:
            self._wanted_s = now_s
        # Between two pieces, the thread that ingests takes a moment to bring the next one.
        self._owed_s = min(self._owed_s + _OWED_SHARE * seconds, _OWED_S) if now_s < self._wanted_s + _OWED_S else 0.0

    def due_s(self, *, fusing: bool, loading: bool, decoding: bool) -> float:
        """Return in how many seconds the next piece is due; infinity if it is due only after another step.

        Parameters
        ----------
        fusing : bool
            Whether a request is being fused, or can begin.
        loading : bool
            Whether a request's chunks are being opened.
        decoding : bool
            Whether answers are being written.
        """
        now_s = self._clock()
        self._is_beside = fusing or loading or decoding
        self._loading_s = min(self._loading_s, now_s) if loading else float("inf")
        while self._waiting and not self._waiting[0].is_wanted:
            self._waiting.popleft()
        if not self._waiting:
            return float("inf")
        if fusing:
            return 0.0 if self._owed_s >= _OWED_S else float("inf")
        if loading and now_s < self._loading_s + _LOADING_S:
            return self._loading_s + _LOADING_S - now_s
        if decoding:
            return 0.0 if self._owed_s > 0 else float("inf")
        return max(0.0, self._request_s + _GRACE_S - now_s)

    def compute_next(self) -> None:
        """Compute a piece, and note how fast that was."""
        piece, started_s = self._waiting.popleft(), self._clock()
        piece.compute()
        seconds = self._clock() - started_s
        self._owed_s = self._owed_s - seconds if self._is_beside else 0.0
        if piece.num_tokens:
            self._speed.note(seconds, piece.num_tokens)
