"""Write the table of options in ``docs/options.md``: ``python docs/options.py``, after every change of an option."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from fused_kv_llm.config import EngineConfig, option_of

PAGE = Path(__file__).with_name("options.md")
BEGIN, END = "<!-- made by docs/options.py -->", "<!-- end -->"


def table() -> str:
    """Return the table of an engine's options in Markdown."""
    rows = ["| option | on the command line | type | default | unit | what it is |", "|---|---|---|---|---|---|"]
    for name, field in EngineConfig.model_fields.items():
        note = option_of(name)
        flags = [f"`--{name.replace('_', '-')}`"] if note.on_command_line else []
        flags += [f"`{flag}`" for flag in (note.short_flag, note.variable) if flag]
        description = " ".join((field.description or "").split()).replace("``", "`").replace("|", "\\|")
        cells = [
            f"`{name}`{' *' * note.identity}",
            ", ".join(flags),
            _type(field.annotation).replace("|", "\\|"),
            f"`{field.default!r}`",
            note.unit,
            description,
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def page_with(made: str, page: str, begin: str = BEGIN) -> str:
    """Return the page with a table in place of the one that it has."""
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(END)
    return f"{before}{begin}\n\n{made}\n\n{END}{after}"


def _type(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return " or ".join(f'`"{value}"`' for value in get_args(annotation))
    parts = get_args(annotation)
    if not parts:
        return {Any: "object", NoneType: "None"}.get(annotation) or f"{annotation.__name__}"
    return ", ".join(dict.fromkeys(_type(part) for part in parts))


if __name__ == "__main__":
    PAGE.write_text(page_with(table(), PAGE.read_text(encoding="utf-8")), encoding="utf-8")
