"""Documents: uploaded with progress, cancelled, resumed, looked into, checked, mended and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from ui.looking import documented, is_wider_than_window, photographed, violations

SCRIPTED = "<img src=x onerror=alert(1)>.txt"
TEXTS = [f"The {name} lies in the harbour of {name}ton, at pier {number}. " * 4 for number, name in enumerate("ABC", 3)]


@pytest.fixture
def api(ui_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ui_url, timeout=60) as client:
        before = {one["id"] for one in client.get("/v1/documents?limit=100").json()["data"]}
        yield client
        for one in client.get("/v1/documents?limit=100").json()["data"]:
            if one["id"] not in before:
                client.delete(f"/v1/documents/{one['id']}")


def file_of(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "mimeType": "text/plain", "buffer": text.encode()}


def chosen(page: Any, *files: dict[str, Any]) -> None:
    page.locator("input[type=file]").set_input_files(list(files))


def job(page: Any, name: str) -> Any:
    return page.get_by_role("list", name="Ingestions").get_by_role("listitem").filter(has_text=name)


def test_files_are_uploaded_one_is_cancelled_and_resumed(
    open_page: Any, ui_engine: Any, api: httpx.Client, axe_source: str
) -> None:
    page = open_page("#/documents")
    with ui_engine.model_lock:
        chosen(page, *(file_of(f"pier-{number}.txt", text) for number, text in enumerate(TEXTS)))
        expect(page.get_by_role("list", name="Chosen files").get_by_role("listitem")).to_have_count(3)
        expect(page.get_by_label("Chosen files")).to_contain_text("1 chunk (1 new)")
        page.get_by_role("button", name="Upload 3 files").click()
        expect(job(page, "pier-2.txt")).to_be_visible()
        page.get_by_role("button", name="Cancel pier-2.txt").click()
        expect(job(page, "pier-2.txt")).to_contain_text("cancelled")
        assert violations(page, axe_source) == []
        photographed(page, "documents-jobs")
        page.reload()
        expect(job(page, "pier-0.txt").get_by_role("progressbar")).to_be_visible()
    page.get_by_role("link", name="Chat").click()
    page.get_by_label("Longest answer, tokens").fill("4")
    page.get_by_label("Question", exact=True).fill("Which ships are there?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer-footer")).to_be_visible(timeout=30_000)
    page.get_by_role("link", name="Documents", exact=True).click()
    expect(job(page, "pier-0.txt")).to_contain_text("done")
    expect(job(page, "pier-1.txt")).to_contain_text("done")
    page.get_by_role("button", name="Resume pier-2.txt").click()
    expect(job(page, "pier-2.txt")).to_contain_text("done")
    row = page.get_by_role("row").filter(has_text="pier-2.txt")
    expect(row).to_contain_text("ready")


def test_a_document_is_found_read_and_deleted(open_page: Any, api: httpx.Client, axe_source: str) -> None:
    page = open_page("#/documents")
    chosen(page, file_of(SCRIPTED, f"<script>alert(1)</script> {TEXTS[0]}"))
    page.get_by_role("button", name="Upload 1 file").click()
    expect(job(page, SCRIPTED)).to_contain_text("done")
    page.keyboard.press("/")
    page.locator("main").focus()
    page.keyboard.press("/")
    expect(page.get_by_label("Search documents")).to_be_focused()
    page.keyboard.type("onerror")
    expect(page.get_by_role("region", name="Documents").get_by_role("row")).to_have_count(2)
    page.get_by_role("region", name="Documents").get_by_role("link", name=SCRIPTED).click()
    view = page.locator(".document")
    expect(view.locator(".chunks li").first).to_contain_text("<script>alert(1)</script>")
    expect(page.locator("main img, main script")).to_have_count(0)
    view.get_by_role("button", name="Warm").click()
    expect(view).to_contain_text("on the way into memory")
    assert violations(page, axe_source) == []
    view.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete it").click()
    page.wait_for_url("**/#/documents")
    page.get_by_label("Search documents").fill("onerror")
    expect(page.get_by_text("No name contains this")).to_be_visible()
    assert api.post("/v1/documents/check", json={"text": TEXTS[0][:120]}).json()["outcome"] != "reusable"


def test_pictures_of_a_document(open_page: Any, ui_url: str, axe_source: str) -> None:
    page = open_page("#/documents")
    page.get_by_role("link", name="01-fleet.txt").click()
    expect(page.locator(".chunks li").first).to_be_visible()
    assert violations(page, axe_source) == []
    photographed(page, "documents")
    documented(page, "documents")
    page.set_viewport_size({"width": 360, "height": 740})
    expect(page.get_by_role("link", name="All documents")).to_be_visible()
    assert not is_wider_than_window(page)


def test_a_file_that_cannot_be_read_is_refused_at_once(open_page: Any) -> None:
    page = open_page("#/documents")
    chosen(page, file_of("program.exe", "x"))
    expect(page.get_by_role("alert")).to_contain_text("Files of this type are not read")
    expect(page.get_by_role("button", name="Upload 0 files")).to_be_disabled()


def test_an_altered_chunk_is_explained_and_mended(open_page: Any, api: httpx.Client, axe_source: str) -> None:
    page = open_page("#/documents")
    (fleet,) = [one for one in api.get("/v1/documents").json()["data"] if one["name"] == "01-fleet.txt"]
    chunk = api.get(f"/v1/documents/{fleet['id']}").json()["chunks"][1]["text"]
    words = chunk.split()
    page.get_by_label("Text to check").fill(" ".join([*words[:9], "altered", *words[10:]]))
    page.get_by_role("button", name="Check", exact=True).click()
    verdict = page.locator(".verdict")
    expect(verdict).to_be_visible()
    expect(verdict.locator(".badge")).not_to_have_text("reusable")
    assert violations(page, axe_source) == []
    verdict.scroll_into_view_if_needed()
    photographed(page, "documents-check")
    page.get_by_role("button", name="Store this text").click()
    expect(verdict.locator(".badge")).to_have_text("reusable", timeout=30_000)
