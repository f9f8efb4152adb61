"""The progress bar of an ingestion."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Advance", "ingestion_progress"]


class Advance(Protocol):
    """Tells the bar that one more chunk is written."""

    def __call__(self, tokens: int, nbytes: int) -> None:
        """Advance by one chunk of that many tokens and bytes."""


def _ignore(tokens: int, nbytes: int) -> None:
    return None


@contextmanager
def ingestion_progress(chunks: int, tokens: int, *, enabled: bool) -> Iterator[Advance]:
    """Show chunks, tokens per second, bytes written and the time left.

    Parameters
    ----------
    chunks, tokens : int
        What is to be done.
    enabled : bool
        Off yields a function that shows nothing.
    """
    if not enabled or chunks == 0:
        yield _ignore
        return
    columns = (
        TextColumn("[bold]Prefilling chunks"),
        BarColumn(),
        TextColumn("{task.fields[chunks]}"),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as bar:
        task = bar.add_task("prefill", total=tokens, rate="", chunks=f"0/{chunks}")
        done = {"chunks": 0, "tokens": 0, "bytes": 0}

        def advance(tokens: int, nbytes: int) -> None:
            done["chunks"] += 1
            done["tokens"] += tokens
            done["bytes"] += nbytes
            elapsed = bar.tasks[0].elapsed or 1e-9
            rate = (
                f"{done['chunks'] / elapsed:.1f} chunks/s, {done['tokens'] / elapsed:,.0f} tokens/s, "
                f"{done['bytes'] / 1e6:,.0f} MB"
            )
            # The bar runs over tokens: chunks come longest first, so counting them would misjudge the time left.
            bar.update(task, advance=tokens, rate=rate, chunks=f"{done['chunks']}/{chunks}")

        yield advance
