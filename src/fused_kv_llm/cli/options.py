"""The options of an engine as options of commands: made from ``EngineConfig``, so that a new one appears by itself."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args

import typer
from pydantic.fields import FieldInfo

from fused_kv_llm.config import EngineConfig, Option, option_of

__all__ = ["IDENTITY_OPTIONS", "engine_option", "takes_engine_options"]

IDENTITY_OPTIONS = frozenset(name for name in EngineConfig.model_fields if option_of(name).identity)
"""Options on which stored KV depends: whoever asks must have those of the ingestion."""

_Command = Callable[..., None]


def takes_engine_options(*names: str, leave_out: Collection[str] = ()) -> Callable[[_Command], _Command]:
    """Give a command options of an engine, which it gets as its ``**options``.

    Parameters
    ----------
    *names : str
        Which of the fields of ``EngineConfig``; without names all that can be written on a command line.
    leave_out : collection of str
        Fields that the command does not take. Those that it declares itself are left out as well.
    """

    def decorate(command: _Command) -> _Command:
        *own, rest = inspect.signature(command, eval_str=True).parameters.values()
        taken = {*leave_out, *(parameter.name for parameter in own)}
        every = [name for name in EngineConfig.model_fields if option_of(name).on_command_line and name not in taken]
        options = [
            rest.replace(
                name=name,
                kind=inspect.Parameter.KEYWORD_ONLY,
                annotation=engine_option(name),
                default=EngineConfig.model_fields[name].default,
            )
            for name in names or every
        ]

        @functools.wraps(command)
        def run(*args: Any, **values: Any) -> None:
            command(*args, **values)

        run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
        return run

    return decorate


def engine_option(name: str) -> Any:
    """Return the annotation of a command's parameter for an option of an engine.

    Parameters
    ----------
    name : str
        A field of ``EngineConfig``.
    """
    field, note = EngineConfig.model_fields[name], option_of(name)
    kind, parser = _kind(field)
    return Annotated[
        kind,
        typer.Option(
            *_flags(name, note),
            help=" ".join((field.description or "").replace("``", "").split()),
            envvar=note.variable,
            parser=parser,
            metavar=None if parser is None else "NUMBER|auto",
        ),
    ]


def _flags(name: str, note: Option) -> tuple[str, ...]:
    """Return the flags where they are not those that typer makes of the name."""
    return () if note.short_flag is None else (f"--{name.replace('_', '-')}", note.short_flag)


def _kind(field: FieldInfo) -> tuple[Any, Callable[[str], Any] | None]:
    """Return the type in which an option is written, and what reads it where typer does not."""
    kinds = set(get_args(field.annotation)) or {field.annotation}
    if kinds <= {bool, int, NoneType}:
        return field.annotation, None
    if float in kinds:
        return str, _number_or_word
    kind: Any = Path if Path in kinds and Any not in kinds else str
    return (kind | None if NoneType in kinds else kind), None


def _number_or_word(value: Any) -> Any:
    try:
        return float(value)
    except ValueError:
        return value
