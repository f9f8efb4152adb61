"""The file that ``report.to_html()`` writes, opened from the disk: the same view, under a policy of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect
from ui import synthetic
from ui.looking import is_wider_than_window, photographed, violations

EVIL = "</script><img src=x onerror=alert(1)>"


@pytest.fixture
def file_page(browser: Any, tmp_path: Path) -> Any:
    trace = synthetic.prompt_trace(600, chunks=3)
    report = synthetic.report(trace, synthetic.verdicts(trace.chunks()))
    report.trace = trace
    path = tmp_path / "report.html"
    path.write_text(report.to_html(question=EVIL, answer=f"412 {EVIL}"), encoding="ascii")
    page = browser.new_context(reduced_motion="reduce").new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if request.url != path.as_uri() else None)
    page.goto(path.as_uri())
    yield page
    page.context.close()
    assert wrong == []


def test_the_file_shows_the_prompt_its_chunks_and_its_costs(file_page: Any, axe_source: str) -> None:
    page = file_page
    expect(page.get_by_role("heading", level=1)).to_have_text(EVIL)
    expect(page.locator(".prompt-map .in-chunk").first).to_be_visible()
    expect(page.locator(".told")).to_have_text(f"412 {EVIL}")
    assert page.get_by_role("button", name="Ingest this text").count() == 0
    page.get_by_role("button", name="Replay").click()
    expect(page.locator(".slider output")).to_be_visible()
    assert page.locator("img").count() == 0
    assert violations(page, axe_source) == []
    photographed(page, "report-file")
    page.set_viewport_size({"width": 360, "height": 740})
    assert not is_wider_than_window(page)
