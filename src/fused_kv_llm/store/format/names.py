"""Names of chunk files and sidecars: no other string ever becomes part of a path."""

from __future__ import annotations

import re

from fused_kv_llm.errors import ConfigError

__all__ = ["check_key", "check_name", "file_name", "parse_name"]

_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_FILE = re.compile(rf"({_KEY.pattern})(?:\.({_NAME.pattern}))?\.safetensors")


def check_key(key: str) -> str:
    """Return ``key`` if it is a chunk's key.

    Raises
    ------
    ConfigError
        It is not 64 lower-case hexadecimal digits.
    """
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise ConfigError(f"A chunk's key is 64 hexadecimal digits, as chunk_key() returns it, not {key!r}.")
    return key


def check_name(name: str) -> str:
    """Return ``name`` if it is a sidecar's name.

    Raises
    ------
    ConfigError
        It is not 1 to 100 letters, digits, and ``_ . -`` after the first.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigError(f"A sidecar's name is up to 100 letters, digits, '_', '-' and '.', not {name!r}.")
    return name


def file_name(key: str, name: str | None = None) -> str:
    """Return the name of a chunk's file, or of its sidecar of that name, on the disk and on the remote tier.

    Raises
    ------
    ConfigError
        As ``check_key`` and ``check_name``.
    """
    check_key(key)
    return f"{key}.safetensors" if name is None else f"{key}.{check_name(name)}.safetensors"


def parse_name(filename: str) -> tuple[str, str | None] | None:
    """Return the key in a file's name and, for a sidecar, its name; None if the file is not a store's."""
    match = _FILE.fullmatch(filename)
    return (match[1], match[2]) if match is not None else None
