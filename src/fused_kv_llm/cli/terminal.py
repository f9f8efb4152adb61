"""How the command line talks: consoles, errors as one line, and quiet libraries."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from fused_kv_llm.errors import FusedKVError, FusedKVWarning

__all__ = ["FriendlyGroup", "doing", "err", "out", "print_data", "quiet_libraries", "talking_aside"]

_FAILED = 1
_INTERRUPTED = 130

out = Console()
err = Console(stderr=True)


class FriendlyGroup(TyperGroup):
    """A command group that turns the project's errors into one line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; exit 1 on an error of this project, 130 when interrupted."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("always", FusedKVWarning)
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except FusedKVError as error:
                err.print(f"[red]Error:[/] {escape(_one_line(error))}", highlight=False, soft_wrap=True)
                raise typer.Exit(_FAILED) from error
            except KeyboardInterrupt as error:
                err.print("Stopped. What is stored stays; the same command goes on from there.")
                raise typer.Exit(_INTERRUPTED) from error


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Say what is being done: a spinner on a terminal, a line elsewhere."""
    if out.is_terminal:
        with out.status(what):
            yield
    else:
        out.print(what, highlight=False, markup=False)
        yield


@contextmanager
def talking_aside(*, aside: bool) -> Iterator[None]:
    """Have what people read go to stderr, where stdout is for data that a program reads."""
    before, out.stderr = out.stderr, aside or out.stderr
    try:
        yield
    finally:
        out.stderr = before


def print_data(data: Any) -> None:
    """Print plain data as JSON."""
    out.print_json(json.dumps(data))


def quiet_libraries() -> None:
    """Keep the progress bars and notices of transformers and its hub client out of the terminal."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())


def _show_warning(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    if issubclass(category, FusedKVWarning):
        err.print(f"[yellow]Note:[/] {escape(_one_line(message))}", highlight=False, soft_wrap=True)
