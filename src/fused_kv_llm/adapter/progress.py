"""How far a long batch is: a line on a terminal and in a notebook, nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["batch_progress", "count_answer"]

_FEWEST = 8
# Frameworks hand it on to the threads and tasks that answer the prompts of a batch.
_on_answer: ContextVar[Callable[[], None] | None] = ContextVar("fused_kv_batch", default=None)


@contextmanager
def batch_progress(num_prompts: int) -> Iterator[None]:
    """Show how many prompts of a batch are answered, and the time left, while the batch is computed inside.

    Parameters
    ----------
    num_prompts : int
        With fewer than eight nothing is shown, and nothing for a batch inside another.
    """
    console = Console(stderr=True)
    if num_prompts < _FEWEST or _on_answer.get() is not None or not (console.is_terminal or console.is_jupyter):
        yield
        return
    columns = (TextColumn("[bold]Answering"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=num_prompts)
        token = _on_answer.set(lambda: bar.advance(task))
        try:
            yield
        finally:
            _on_answer.reset(token)


def count_answer() -> None:
    """Note that a prompt was answered; without a batch that shows how far it is, do nothing."""
    on_answer = _on_answer.get()
    if on_answer is not None:
        on_answer()
