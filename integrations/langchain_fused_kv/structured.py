"""Answers of a given schema: what they are held to, and the chains that make objects of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

from fused_kv_llm.errors import ConfigError
from langchain_fused_kv.tools import call_schema

__all__ = ["answer_schema", "parser_for", "with_raw"]


def answer_schema(
    tools: Sequence[Mapping[str, Any]], choice: str | None, wanted: Mapping[str, Any] | None, arguments: str
) -> tuple[dict[str, Any] | None] | None:
    """Return the JSON schema that an answer must have.

    Parameters
    ----------
    tools : sequence of mapping
        In OpenAI's form.
    choice : str or None
        What :func:`langchain_fused_kv.tools.chosen_tool` returned; a forced call wins over `wanted`.
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


def parser_for(schema: Any, *, from_tool_call: bool) -> Runnable[Any, Any]:
    """Return the parser of an answer: into a pydantic object where the schema is a class of it, else into a dict."""
    is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
    if from_tool_call:
        if is_class:
            return PydanticToolsParser(tools=[schema], first_tool_only=True)
        name = convert_to_openai_tool(schema)["function"]["name"]
        return JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
    return PydanticOutputParser(pydantic_object=schema) if is_class else JsonOutputParser()


def with_raw(llm: Runnable[Any, Any], parser: Runnable[Any, Any]) -> Runnable[Any, Any]:
    """Return a chain to ``{"raw": message, "parsed": object or None, "parsing_error": error or None}``."""
    assign = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
    fallback = RunnablePassthrough.assign(parsed=RunnableLambda(lambda _: None))
    return RunnableMap(raw=llm) | assign.with_fallbacks([fallback], exception_key="parsing_error")
