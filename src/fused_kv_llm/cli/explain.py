"""``fused-kv explain``: would a text be reused, and if not, why."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fused_kv_llm.cli.options import takes_engine_options
from fused_kv_llm.cli.terminal import doing, out, print_data, quiet_libraries, talking_aside
from fused_kv_llm.errors import CorpusError

if TYPE_CHECKING:
    from fused_kv_llm.report import Verdict

__all__ = ["add_explain_command"]

_LEFT_OUT = {"recompute_ratio", "selector", "store_misses", "preprocessing", "variants", "variant_bytes"}
_NOT_REUSED = 1


def add_explain_command(app: typer.Typer) -> None:
    """Add the command to an application."""
    app.command("explain")(takes_engine_options(leave_out=_LEFT_OUT)(_explain))


def _explain(
    text: Annotated[str, typer.Argument(help="A chunk, or a file that contains it.")],
    *,
    prompt: Annotated[Path | None, typer.Option(help="A file with a prompt that should contain it.")] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Also say whether another tenant has stored it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    **options: Any,
) -> None:
    """Say whether a chunk would be reused, and if not, why and what helps; exit code 1 if it would not.

    Give the options of the ingestion.
    """
    chunk, asked = _read(text), None if prompt is None else _content(prompt)
    from fused_kv_llm.engine import FusedKVEngine

    quiet_libraries()
    with talking_aside(aside=as_json), doing(f"Loading {options['model']}"):
        engine = FusedKVEngine(**options, preprocessing="none", store_misses=False)
    with engine:
        if asked is None:
            verdict = engine.explain_text(chunk, operator=operator)
        else:
            verdict = engine.explain(asked, [chunk], operator=operator)[0]
    if as_json:
        print_data(verdict.to_dict())
    else:
        _show(verdict)
    if not verdict.is_reused:
        raise typer.Exit(_NOT_REUSED)


def _show(verdict: Verdict) -> None:
    out.print(f"[bold]{verdict.outcome.value}[/] {escape(verdict.detail)}", highlight=False, soft_wrap=True)
    for line in (verdict.remedy, verdict.diff):
        if line:
            out.print(escape(line), highlight=False, soft_wrap=True)


def _read(text: str) -> str:
    """Return a file's content if the text is a file's name, and otherwise the text."""
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):
        # Too long for a name, or with a character that none has.
        is_file = False
    return _content(Path(text)) if is_file else text


def _content(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{str(path)!r} cannot be read as text: {error}") from error
