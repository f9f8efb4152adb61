"""How far a pass of ingestion is: a bar on a terminal and in a notebook, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["PassCounts", "PreprocessingCounts", "progress_bar"]

_LINE_EVERY_S = 5.0


@dataclass(slots=True)
class PassCounts:
    """What one pass of ingestion has to do and has done.

    Parameters
    ----------
    total_chunks, total_tokens : int
        What is to be done.
    chunks, tokens : int
        What is done and written.
    nbytes : int
        Bytes written.
    unit : str
        What is counted as tokens.
    """

    total_chunks: int = 0
    total_tokens: int = 0
    chunks: int = 0
    tokens: int = 0
    nbytes: int = 0
    unit: str = "tokens"

    def add(self, tokens: int, nbytes: int) -> None:
        """Count one chunk that is written."""
        self.chunks += 1
        self.tokens += tokens
        self.nbytes += nbytes

    def speed(self, elapsed_s: float) -> str:
        """Return chunks and tokens per second, and bytes written, for people."""
        elapsed_s = max(elapsed_s, 1e-9)
        rate = f"{self.chunks / elapsed_s:.1f} chunks/s, {self.tokens / elapsed_s:,.0f} {self.unit}/s"
        return f"{rate}, {self.nbytes / 1e6:,.0f} MB" if self.nbytes or self.unit == "tokens" else rate


@dataclass(slots=True)
class PreprocessingCounts(PassCounts):
    """What the second pass of ingestion has to do and has done.

    Parameters
    ----------
    refreshed : int
        Chunks, of those done, that had been preprocessed after other neighbours.
    stale : int
        Chunks that were preprocessed after other neighbours and stay as they are.
    neighbour_tokens : int
        Tokens of similar chunks that had to be computed beside those that were preprocessed.
    """

    refreshed: int = 0
    stale: int = 0
    neighbour_tokens: int = 0


@contextmanager
def progress_bar(title: str, counts: PassCounts, *, enabled: bool) -> Iterator[Callable[[], None]]:
    """Show chunks, tokens per second, bytes written and the time left.

    Parameters
    ----------
    title : str
        What is done, such as ``"Prefilling chunks"``.
    counts : PassCounts
        Is looked at whenever the callable that this yields is called.
    enabled : bool
        Off shows nothing.
    """
    if not enabled or counts.total_chunks == 0:
        yield lambda: None
        return
    console = Console()
    if console.is_terminal or console.is_jupyter:
        with _bar(title, counts, console) as show:
            yield show
        return
    lines = _Lines(title, counts, console)
    try:
        yield lines.show
    finally:
        lines.end()


@contextmanager
def _bar(title: str, counts: PassCounts, console: Console) -> Iterator[Callable[[], None]]:
    columns = (
        TextColumn(f"[bold]{title}"),
        BarColumn(),
        TextColumn("{task.fields[chunks]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=counts.total_tokens, chunks=f"0/{counts.total_chunks}", speed="")

        def show() -> None:
            # The bar runs over tokens: chunks differ in length, so counting them would misjudge the time left.
            bar.update(
                task,
                total=counts.total_tokens,
                completed=counts.tokens,
                chunks=f"{counts.chunks}/{counts.total_chunks}",
                speed=counts.speed(bar.tasks[0].elapsed or 0.0),
            )

        yield show


class _Lines:
    """The same as text, for logs and pipes."""

    def __init__(self, title: str, counts: PassCounts, console: Console) -> None:
        self._title, self._counts, self._console = title, counts, console
        self._started_s = self._shown_s = time.monotonic()
        self._print(f"{counts.total_chunks} chunks, {counts.total_tokens:,} {counts.unit}")

    def show(self) -> None:
        now = time.monotonic()
        if now - self._shown_s >= _LINE_EVERY_S and self._counts.chunks:
            self._shown_s = now
            left_s = (now - self._started_s) * (self._counts.total_tokens / self._counts.tokens - 1)
            self._print(f"{self._done()}, {left_s:.0f} s left")

    def end(self) -> None:
        self._print(self._done())

    def _done(self) -> str:
        speed = self._counts.speed(time.monotonic() - self._started_s)
        return f"{self._counts.chunks}/{self._counts.total_chunks}, {speed}"

    def _print(self, text: str) -> None:
        self._console.print(f"{self._title}: {text}", highlight=False, soft_wrap=True)
