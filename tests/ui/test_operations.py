"""The figures of the server: there, accessible, asked again by themselves unless paused."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect
from ui.looking import documented, is_wider_than_window, photographed, violations


def test_figures_are_shown_and_asked_again_unless_paused(open_page: Any, axe_source: str) -> None:
    page = open_page("#/operations")
    page.get_by_role("heading", name="Since the start").wait_for()
    with page.expect_request("**/v1/operations*"):
        pass
    page.get_by_role("button", name="Pause refreshing").click()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.wait_for_timeout(6_000)
    assert asked == []
    with page.expect_request("**/v1/operations?minutes=60"):
        page.get_by_label("Recent is the last").select_option("hour")
    expect(page.get_by_text("disk", exact=True)).to_be_visible()
    documented(page, "operations")
    assert violations(page, axe_source) == []
    photographed(page, "operations")
    page.set_viewport_size({"width": 360, "height": 740})
    assert not is_wider_than_window(page)
