"""The frame: navigation, theme, keyboard, and that every screen is accessible and fits 360 pixels."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect
from ui.looking import is_wider_than_window, violations

SCREENS = ("chat", "documents", "requests", "compare", "operations", "connect")
DARK, LIGHT = "rgb(18, 21, 19)", "rgb(245, 246, 244)"


@pytest.mark.parametrize("screen", SCREENS)
def test_a_screen_is_accessible_and_fits(open_page: Any, axe_source: str, screen: str) -> None:
    page = open_page(f"#/{screen}", width=360, height=740)
    page.wait_for_load_state("networkidle")
    assert violations(page, axe_source) == []
    assert not is_wider_than_window(page)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.emulate_media(color_scheme="dark")
    assert violations(page, axe_source) == []


def test_keys_lead_everywhere(open_page: Any) -> None:
    page = open_page("#/chat")
    page.get_by_role("navigation").wait_for()
    for key, screen in (("d", "documents"), ("r", "requests"), ("o", "operations"), ("c", "chat")):
        page.locator("main").focus()
        page.keyboard.press("g")
        page.keyboard.press(key)
        page.wait_for_url(f"**/#/{screen}")
    page.locator("main").focus()
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keyboard").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")


def test_the_theme_is_kept(open_page: Any) -> None:
    page = open_page("#/connect")
    page.get_by_label("Theme").select_option("dark")
    whole = expect(page.locator("html"))
    whole.to_have_css("background-color", DARK)
    page.reload()
    whole.to_have_css("background-color", DARK)
    page.get_by_label("Theme").select_option("system")
    whole.to_have_css("background-color", LIGHT)
