"""Tool calls: how the models' chat templates write them, and how they are read out of an answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fused_kv_llm.errors import ConfigError

__all__ = [
    "CallStream",
    "ToolAnswer",
    "ToolCall",
    "arguments_key",
    "call_marker",
    "call_schema",
    "chosen_tool",
    "tools_in_system_message",
]

_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>")
_HERMES = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def call_marker(template_source: str) -> str:
    """Return what a model of this chat template writes before a tool call; empty where it is the bare JSON."""
    return next((marker for marker in _MARKERS if marker in template_source), "")


def arguments_key(template_source: str) -> str:
    """Return the name under which a model of this chat template gives a call's arguments."""
    return "parameters" if '"parameters": ' in template_source and '"arguments"' not in template_source else "arguments"


def call_schema(tools: Sequence[Mapping[str, Any]], name: str | None, arguments: str = "arguments") -> dict[str, Any]:
    """Return the JSON schema of one call.

    Parameters
    ----------
    tools : sequence of mapping
        In OpenAI's form.
    name : str or None
        The tool to call; None allows any of them.
    arguments : str
        Name of the property with the arguments.
    """
    functions = [tool["function"] for tool in tools]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function["name"]},
                arguments: function.get("parameters") or {"type": "object", "properties": {}},
            },
            "required": ["name", arguments],
        }
        for function in functions
        if name in (None, function["name"])
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def chosen_tool(choice: Mapping[str, Any] | str | bool | None, names: Sequence[str]) -> str | None:
    """Return what a caller's ``tool_choice`` means.

    Parameters
    ----------
    choice : mapping, str, bool or None
        As OpenAI's API and LangChain's chat models take it.
    names : sequence of str
        Of the tools that are bound.

    Returns
    -------
    str or None
        The name of the tool to call, ``"any"`` for one of them; ``"auto"``, ``"none"`` or None for no forced call.

    Raises
    ------
    ConfigError
        If the tool is not one of those.
    """
    if isinstance(choice, Mapping):
        choice = str(choice.get("function", choice).get("name"))
    if choice is True or choice in ("any", "required"):
        return "any"
    if not choice or choice in ("auto", "none"):
        return str(choice) if choice else None
    if choice not in names:
        raise ConfigError(f"tool_choice={choice!r} is not one of the tools {', '.join(names)}")
    return str(choice)


def tools_in_system_message(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Rewrite a conversation with tools for a chat template that knows none.

    The tools are described in the system message, calls become text of the assistant, and results become messages
    of the user: the form that Hermes and Qwen2.5 models are trained on.
    """
    rewritten: list[dict[str, Any]] = []
    for message in messages:
        content = message["content"]
        for call in message.get("tool_calls", ()):
            content += f"\n<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        if message["role"] == "tool":
            rewritten.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        else:
            text = content.strip() if "tool_calls" in message else content
            rewritten.append({"role": message["role"], "content": text})
    if tools:
        described = _HERMES.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if rewritten and rewritten[0]["role"] == "system":
            rewritten[0]["content"] += f"\n\n{described}"
        else:
            rewritten.insert(0, {"role": "system", "content": described})
    return rewritten


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model wrote.

    Parameters
    ----------
    name : str
        The tool's name.
    arguments : dict
        Parsed from JSON.
    id : str
        Unique, made when the call was read.
    """

    name: str
    arguments: dict[str, Any]
    id: str


@dataclass(slots=True)
class ToolAnswer:
    """The calls of an answer.

    Parameters
    ----------
    text : str
        What is left for the user.
    calls : list of ToolCall
    invalid : list of str
        Texts that were marked as calls but are not JSON with a name and arguments.
    """

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)


class CallStream:
    """Separates text, which is shown at once, from calls, which are read at the end.

    Parameters
    ----------
    marker : str
        What stands before a call. An answer that begins with ``{`` or ``[`` may be a call without it, since some
        models' markers are special tokens, which are not part of the text.
    """

    def __init__(self, marker: str) -> None:
        self._marker = marker
        self._held = ""
        self._shown = False

    def push(self, piece: str) -> str:
        """Take a piece of the answer and return the text that may be shown now."""
        self._held += piece
        begun = self._held.lstrip()
        if not self._shown and (not begun or begun[0] in "{["):
            return ""
        if self._marker and self._marker in self._held:
            cut = self._held.index(self._marker)
        else:
            overlaps = range(min(len(self._marker) - 1, len(self._held)), 0, -1)
            cut = len(self._held) - next((n for n in overlaps if self._held.endswith(self._marker[:n])), 0)
        shown, self._held = self._held[:cut], self._held[cut:]
        self._shown = self._shown or bool(shown)
        return shown

    def finish(self) -> ToolAnswer:
        """Return what was held back, read as calls where it can be."""
        answer = ToolAnswer()
        rest = self._held
        marked = bool(self._marker) and self._marker in rest
        while rest.strip():
            before, found, after = rest.partition(self._marker) if marked else ("", "", rest)
            answer.text += before if before.strip() else ""
            if marked and not found:
                break
            read = _read_calls(after)
            if read is None and not found:
                answer.text += after
                break
            if read is None:
                broken, _, rest = after.partition(_closing(self._marker))
                answer.invalid.append(broken.strip())
                continue
            calls, rest = read
            answer.calls += calls
            closing = _closing(self._marker)
            rest = rest.lstrip().removeprefix(closing) if closing else rest
            if not marked:
                answer.text += rest.strip()
                break
        return answer


def _closing(marker: str) -> str:
    return marker.replace("<", "</", 1) if marker.startswith("<") and not marker.startswith("<|") else ""


def _read_calls(text: str) -> tuple[list[ToolCall], str] | None:
    """Read one call or a list of calls at the beginning of a text; return them and the rest."""
    stripped = text.lstrip()
    try:
        value, end = json.JSONDecoder().raw_decode(stripped)
    except ValueError:
        return None
    calls = []
    for item in value if isinstance(value, list) else [value]:
        arguments = item.get("arguments", item.get("parameters")) if isinstance(item, dict) else None
        if not isinstance(arguments, dict) or not isinstance(item.get("name"), str):
            return None
        calls.append(ToolCall(item["name"], arguments, f"call_{uuid.uuid4().hex[:24]}"))
    return (calls, stripped[end:]) if calls else None
