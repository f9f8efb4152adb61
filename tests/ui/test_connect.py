"""Connect: the snippets name this server, and do what they say."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from playwright.sync_api import expect
from ui.looking import documented, photographed, violations


def test_a_snippet_runs_as_it_is(open_page: Any, ui_url: str, axe_source: str) -> None:
    page = open_page("#/connect")
    expect(page.get_by_text("takes requests")).to_be_visible()
    snippet = page.locator("#snippet pre")
    expect(snippet).to_contain_text("smollm2-135m")
    ran = subprocess.run(
        [sys.executable, "-c", snippet.inner_text()], check=False, capture_output=True, text=True, timeout=120
    )
    assert "tokens were reused" in ran.stdout, ran.stderr
    photographed(page, "connect")
    documented(page, "connect")
    page.get_by_role("tab", name="openai").focus()
    for name in ("LangChain", "LlamaIndex", "curl", "Documents"):
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tab", name=name)).to_be_focused()
        expect(snippet).to_contain_text(ui_url)
        assert violations(page, axe_source) == []


def test_a_model_name_with_markup_stays_text(open_page: Any, ui_url: str) -> None:
    page = open_page("about:blank")
    told = {
        "version": "0", "model": "<img src=x onerror=alert(1)>'\"", "context_length": 1, "recompute_ratio": 0,
        "selector": "<b>x</b>", "selectors": [], "max_answer_tokens": 1, "upload_types": [], "max_upload_bytes": 1,
        "questions": ["<script>alert(1)</script>"], "paths": [],
    }  # fmt: skip
    page.route("**/v1/ui", lambda route: route.fulfill(json=told))
    page.goto(f"{ui_url}/#/connect")
    expect(page.locator("main")).to_contain_text("<img src=x")
    expect(page.locator("main img, main script, main b")).to_have_count(0)
    page.goto(f"{ui_url}/#/chat")
    expect(page.get_by_role("button", name="<script>alert(1)</script>")).to_be_visible()


def test_a_key_is_asked_for_and_kept_for_the_tab_only(open_page: Any, ui_url: str) -> None:
    page = open_page("about:blank")
    error = {"error": {"message": "A valid key is needed", "code": "invalid_api_key"}}
    seen: list[str | None] = []

    def guarded(route: Any) -> None:
        key = route.request.headers.get("authorization")
        seen.append(key)
        if key == "Bearer the key":
            route.continue_()
        else:
            route.fulfill(status=401, json=error)

    page.route("**/v1/ui", guarded)
    page.expected_errors.append("401")
    page.goto(f"{ui_url}/#/connect")
    page.get_by_label("This server needs a key").fill("the key")
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_contain_text("smollm2-135m")
    assert seen[-1] == "Bearer the key"
    assert "the key" not in page.evaluate("JSON.stringify(localStorage)")
