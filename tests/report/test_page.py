"""The report as a file: whole in itself, one script that is ours, and data that cannot end it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st
from report.test_html import traces

from fused_kv_llm import FusionReport
from fused_kv_llm.report.trace import PromptTrace

EVIL = "</script><script>alert(1)</script><!--<script>"


class _Scripts(HTMLParser):
    """Reads scripts as a browser does: to the first end tag."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.scripts: list[tuple[str | None, str]] = []
        self.title = self._last = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._last = tag
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_endtag(self, tag: str) -> None:
        self._last = ""

    def handle_data(self, data: str) -> None:
        if self._last == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        if self._last == "title":
            self.title += data


@given(traces(), st.text("ab<>/!-&\"'\\é😀\u2028scriptS", max_size=40))
def test_data_come_back_as_they_were_and_end_no_script(trace: PromptTrace, answer: str) -> None:
    page = FusionReport(warnings=[EVIL, answer], trace=trace).to_html(question=EVIL, answer=answer)
    read = _Scripts(page)
    assert [kind for kind, _ in read.scripts] == ["application/json", None]
    data = json.loads(read.scripts[0][1])
    assert data["question"] == read.title == EVIL
    assert data["detail"]["answer"] == answer
    assert data["detail"]["report"]["warnings"] == [EVIL, answer]
    assert data["trace"] == trace.to_dict()


def test_the_page_is_ascii_loads_nothing_and_runs_its_own_script_only() -> None:
    page = FusionReport().to_html(chunks=[{"text": "Ærø", "source": "føroyar.txt"}])
    assert page.isascii()
    assert not re.search(r"""(?:src|href)=["']?(?:https?:|/)""", page)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert "default-src 'none'" in policy
    digest = hashlib.sha256(_Scripts(page).scripts[1][1].encode()).digest()
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}';" in policy
