"""The JSON schema that an answer is held to: a forced tool call's, or the caller's ``response_format``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fused_kv_llm.decoding.tool_calls import call_schema
from fused_kv_llm.errors import ConfigError

__all__ = ["answer_schema"]


def answer_schema(
    tools: Sequence[Mapping[str, Any]], choice: str | None, wanted: Mapping[str, Any] | None, arguments: str
) -> tuple[dict[str, Any] | None] | None:
    """Return the JSON schema that an answer must have.

    Parameters
    ----------
    tools : sequence of mapping
        In OpenAI's form.
    choice : str or None
        What :func:`chosen_tool` returned; a forced call wins over `wanted`.
    wanted : mapping or None
        A ``response_format``.
    arguments : str
        The name under which the model gives a call's arguments.

    Returns
    -------
    tuple or None
        The schema in a tuple, since None in it stands for any JSON object; None where the answer is free.

    Raises
    ------
    ConfigError
        If the format is of another type.
    """
    if tools and choice not in (None, "auto", "none"):
        return (call_schema(tools, None if choice == "any" else choice, arguments),)
    if wanted is None:
        return None
    kind, schema = wanted.get("type"), wanted.get("schema", wanted.get("json_schema"))
    if kind not in ("json_schema", "json_object"):
        raise ConfigError(f"response_format of type {kind!r} is none of json_schema, json_object")
    if isinstance(schema, dict) and "schema" in schema:
        schema = schema["schema"]
    return (schema if kind == "json_schema" else None,)
