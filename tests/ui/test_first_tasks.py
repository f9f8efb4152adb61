"""What people do first, by what stands on the screen: docs/web-ui.md has these tasks in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from ui.conftest import QUESTION
from ui.looking import choose_files

OWN_FILE = (
    "The lighthouse of Corrin Head was automated in 1987. Its lamp flashes twice every fifteen seconds and is seen at "
    "a distance of 24 nautical miles. The keeper's cottage beside it is let to visitors from May to September."
)


@pytest.fixture(autouse=True)
def fresh(ui_engine: Any) -> None:
    """Forget what earlier tests have asked."""
    ui_engine.clear_prefix_cache()


@pytest.fixture
def api(ui_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ui_url, timeout=120) as client:
        before = {one["id"] for one in client.get("/v1/documents?limit=100").json()["data"]}
        yield client
        for one in client.get("/v1/documents?limit=100").json()["data"]:
            if one["id"] not in before:
                client.delete(f"/v1/documents/{one['id']}")


def test_which_tokens_were_computed_again_and_what_was_saved(open_page: Any) -> None:
    page = open_page("")
    page.get_by_role("button", name=QUESTION).click()
    page.get_by_role("link", name="Details of this request").click(timeout=60_000)
    expect(page.get_by_text(re.compile(r"^\d+ of \d+ prompt tokens were computed"))).to_be_visible()
    expect(page.get_by_text("recomputed for quality")).to_be_visible()
    page.get_by_role("button", name="Measure a full prefill").click()
    expect(page.get_by_text("times this request’s time to the first token")).to_be_visible(timeout=60_000)


def test_a_file_of_ones_own_is_reused(open_page: Any, api: httpx.Client) -> None:
    page = open_page("")
    page.get_by_role("link", name="Documents", exact=True).click()
    page.get_by_text("Drop files here, or choose them").click()
    choose_files(page, {"name": "lighthouse.txt", "mimeType": "text/plain", "buffer": OWN_FILE.encode()})
    page.get_by_role("button", name="Upload 1 file").click()
    row = page.get_by_role("region", name="Documents").get_by_role("row").filter(has_text="lighthouse.txt")
    expect(row.get_by_text("ready", exact=True)).to_be_visible(timeout=60_000)
    page.get_by_role("link", name="Chat").click()
    page.get_by_placeholder("Ask a question").fill("When was the lighthouse of Corrin Head automated?")
    page.get_by_role("button", name="Ask", exact=True).click()
    source = page.get_by_role("listitem").filter(has_text="lighthouse.txt")
    expect(source).to_contain_text("reused", timeout=60_000)


def test_why_a_chunk_was_not_reused_and_what_mends_it(open_page: Any, ui_engine: Any, api: httpx.Client) -> None:
    (fleet,) = [one for one in api.get("/v1/documents").json()["data"] if one["name"] == "01-fleet.txt"]
    # As if it had made room for others.
    ui_engine.delete_chunks([chunk["text"] for chunk in api.get(f"/v1/documents/{fleet['id']}").json()["chunks"]])
    page = open_page("")
    page.get_by_role("button", name=QUESTION).click()
    source = page.get_by_role("listitem").filter(has_text="01-fleet.txt").first
    expect(source).to_contain_text("deleted", timeout=60_000)
    source.get_by_role("link", name="Store it again").click()
    lost = page.get_by_role("listitem").filter(has_text="What helps").first
    lost.get_by_role("button", name="Store it again").click()
    expect(lost.get_by_text("Stored: the next prompt that contains it reuses it.")).to_be_visible(timeout=60_000)
    page.get_by_role("link", name="Chat").click()
    page.get_by_role("button", name="Retry with these settings").click()
    expect(source).to_contain_text("reused", timeout=60_000)
