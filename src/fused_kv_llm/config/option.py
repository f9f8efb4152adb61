"""A note on an option that pydantic has no place for: its unit, its flag, whether stored KV depends on it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Option"]


@dataclass(frozen=True, slots=True)
class Option:
    """What an option is besides its type, default and description; part of a field's annotation.

    Parameters
    ----------
    unit : str
        Unit of the value, for the documentation.
    identity : bool
        Whether what is stored depends on it, KV or context shifts: asking needs the value of the ingestion.
    on_command_line : bool
        Whether the value can be written as text.
    short_flag : str or None
        A second, shorter name on the command line.
    variable : str or None
        Environment variable that gives the value on the command line.
    """

    unit: str = ""
    identity: bool = False
    on_command_line: bool = True
    short_flag: str | None = None
    variable: str | None = None
