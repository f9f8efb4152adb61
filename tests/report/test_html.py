"""The HTML view of a request: every token of the prompt once, in its colour; nothing of the text is markup."""

from __future__ import annotations

import re
from html import unescape
from html.parser import HTMLParser

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm import FusionReport
from fused_kv_llm.demo import describe
from fused_kv_llm.report.trace import PromptTrace


class _Reader(HTMLParser):
    """Collects the prompt's spans and counts open tags."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.spans: list[tuple[str, str]] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        if self.open[-2:] == ["pre", "span"]:
            self.spans.append((dict(attrs)["title"] or "", ""))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-2:] == ["pre", "span"]:
            title, text = self.spans[-1]
            self.spans[-1] = (title, text + data)


@st.composite
def traces(draw: st.DrawFn) -> PromptTrace:
    words = draw(st.lists(st.text("ab<>&\"'\n {}é", min_size=1, max_size=4), min_size=1, max_size=30))
    ends = np.cumsum([len(word) for word in words])
    offsets = np.stack([ends - [len(word) for word in words], ends], axis=1)
    kind = np.array(draw(st.lists(st.integers(-2, 3), min_size=len(words), max_size=len(words))), dtype=np.int64)
    chunk = np.flatnonzero(kind >= 0)
    chosen = draw(st.lists(st.booleans(), min_size=len(chunk), max_size=len(chunk)))
    return PromptTrace("".join(words), offsets, kind, chunk[np.array(chosen, dtype=bool)])


@given(traces())
def test_every_token_is_shown_once_and_nothing_is_markup(trace: PromptTrace) -> None:
    report = FusionReport(prompt_tokens=len(trace.kind), trace=trace, warnings=["<b>careful</b>"])
    reader = _Reader()
    reader.feed(report._repr_html_())
    reader.close()
    assert reader.open == []
    assert reader.tags <= {"div", "style", "p", "b", "h4", "i", "span", "pre"}
    assert "".join(text for _, text in reader.spans) == trace.text
    expected = [
        word
        for word, kind, position in zip(_words(trace), trace.kind, range(len(trace.kind)), strict=True)
        if position in set(trace.recomputed.tolist())
    ]
    assert "".join(text for title, text in reader.spans if title.startswith("recomputed")) == "".join(expected)
    assert sum(r + c for _, r, c in trace.chunks()) == int((trace.kind >= 0).sum())
    assert "&lt;b&gt;careful" in report._repr_html_()


def _words(trace: PromptTrace) -> list[str]:
    return [trace.text[a:b] for a, b in trace.offsets]


def test_a_report_without_a_prompt_still_shows_its_numbers() -> None:
    report = FusionReport(prompt_tokens=200, reused_tokens=150, fresh_tokens=50, seconds={"fuse": 0.2}, ttft_s=0.25)
    html = unescape(report._repr_html_())
    assert re.search(r"<b>75%</b> of 200 prompt tokens", html)
    assert "200.0 ms" in html
    assert "trace" not in report.to_dict()


def test_what_was_loaded_is_told_by_kind() -> None:
    report = FusionReport(
        bytes_loaded={"disk": 12_000_000}, sidecar_bytes_loaded={"context_shift": 6_100_000, "anchors": 900_000}
    )
    assert "12.0 MB of KV from disk, 6.1 MB of context shifts, 0.9 MB of anchors;" in report._repr_html_()
    assert "(12 MB from disk, 7 MB of sidecars)" in describe(report)
