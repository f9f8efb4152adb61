"""One request as a file to open in a browser: the web UI's view of it, with its data in itself."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from importlib import resources
from typing import Any

from fused_kv_llm.report.html import report_to_html
from fused_kv_llm.report.trace import PromptTrace

__all__ = ["report_page"]

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src '{hash}'; \
style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main id="app">{static}</main>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def report_page(
    report: Mapping[str, Any],
    trace: PromptTrace | None = None,
    *,
    question: str = "",
    answer: str | None = None,
    chunks: Sequence[Mapping[str, Any]] = (),
) -> str:
    """Return a request as a whole HTML page that needs nothing else, and may load nothing.

    Parameters
    ----------
    report : mapping
        What ``FusionReport.to_dict()`` returned.
    trace : PromptTrace or None
        For the prompt's heat map.
    question : str
        The page's title; empty for a general one.
    answer : str or None
        None leaves it out.
    chunks : sequence of mapping
        What was retrieved, each with ``text`` and perhaps ``source`` and ``score``; without, the page has the chunks
        of the report's verdicts.

    Returns
    -------
    str
        ASCII, so that a file of it needs no declared encoding. Where scripts do not run it shows what
        :func:`report_to_html` does.
    """
    detail: dict[str, Any] = {"report": report, "chunks": list(chunks)}
    if answer is not None:
        detail["answer"] = answer
    data = {"question": question, "detail": detail, "trace": None if trace is None else trace.to_dict()}
    style, script = _built("report.css"), _built("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    page = _PAGE.format(
        hash=f"sha256-{digest}",
        title=escape(question or "Report of a prompt"),
        style=style,
        static=report_to_html(report, trace),
        # In a script nothing is markup but "<", with which its end and comments begin.
        data=json.dumps(data, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c"),
        script=script,
    )
    return page.encode("ascii", "xmlcharrefreplace").decode()


@cache
def _built(name: str) -> str:
    return (resources.files("fused_kv_llm.report") / "static" / name).read_text(encoding="ascii").strip()
