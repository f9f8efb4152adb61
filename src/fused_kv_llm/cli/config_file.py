"""A configuration file beside flags and variables: what it says counts where neither of them does."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from fused_kv_llm.errors import ConfigError

__all__ = ["ConfigFile", "from_variables", "more_of_file", "options_table"]

_MORE = "fused_kv_llm.config_file"
# A remote tier's address may hold a password.
_SECRET = ("key", "remote")

from_variables = {"auto_envvar_prefix": "FUSED_KV"}
"""Settings of a command whose options are read from variables too: ``FUSED_KV_PORT`` for ``--port``."""


def _read(context: typer.Context, path: Path | None) -> Path | None:
    if path is None or context.resilient_parsing:
        return path
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"The configuration file {path} cannot be read: {error}") from error
    names = {param.name for param in context.command.params} - {"config", "help", "show_config"}
    context.default_map = {name: value for name, value in values.items() if name in names}
    context.meta[_MORE] = path, {name: value for name, value in values.items() if name not in names}, names
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config", is_eager=True, callback=_read, help="TOML with options by name; flags and variables outrank it."
    ),
]
"""The option of a command that names the file."""


def more_of_file(context: typer.Context, fields: Collection[str]) -> dict[str, Any]:
    """Return what the file says that the command has no flags for.

    Parameters
    ----------
    context : typer.Context
        The command's.
    fields : collection of str
        The names that there may be.

    Raises
    ------
    ConfigError
        If there is another name in it.
    """
    path, more, names = context.meta.get(_MORE, (None, {}, set()))
    for name in more:
        if name not in fields:
            near = difflib.get_close_matches(name, [*names, *fields], 1)
            hint = f"did you mean {near[0]!r}?" if near else "see fused-kv serve --help and docs/server.md."
            raise ConfigError(f"The configuration file {path} has the unknown option {name!r}: {hint}")
    return dict(more)


def options_table(context: typer.Context) -> list[tuple[str, str, str]]:
    """Return the options of a command that runs: name, value without secrets, and where it comes from."""
    path, more, _ = context.meta.get(_MORE, (None, {}, set()))
    sources = {"COMMANDLINE": "flag", "ENVIRONMENT": "variable", "DEFAULT_MAP": str(path), "DEFAULT": "default"}
    rows = []
    for name, value in context.params.items():
        source = context.get_parameter_source(name)
        if name not in ("config", "show_config"):
            rows.append((name, _shown(name, value), sources.get("" if source is None else source.name, "default")))
    return rows + [(name, _shown(name, value), str(path)) for name, value in more.items()]


def _shown(name: str, value: Any) -> str:
    return "***" if value and any(word in name for word in _SECRET) else str(value)
