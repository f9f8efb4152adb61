"""Structured output: the parsers and chains that turn constrained answers into objects."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import JsonOutputKeyToolsParser, PydanticToolsParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnableMap, RunnablePassthrough
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.utils.pydantic import is_basemodel_subclass

__all__ = ["parser_for", "with_raw"]


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
