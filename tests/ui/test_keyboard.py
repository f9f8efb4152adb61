"""Every screen by keyboard alone: whatever can be done is reached by Tab, and it is always seen what has the focus."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from ui import synthetic
from ui.conftest import QUESTION
from ui.keys import Keys
from ui.looking import choose_files


@pytest.fixture
def api(ui_url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=ui_url, timeout=60) as client:
        before = {one["id"] for one in client.get("/v1/documents?limit=100").json()["data"]}
        yield client
        for one in client.get("/v1/documents?limit=100").json()["data"]:
            if one["id"] not in before:
                client.delete(f"/v1/documents/{one['id']}")


def role(page: Any, kind: str, name: str) -> Any:
    return page.get_by_role(kind, name=name, exact=True)


def answered(page: Any) -> None:
    expect(role(page, "button", "Ask")).to_be_visible(timeout=60_000)


@pytest.mark.parametrize("width", [1440, 360])
def test_chat_and_the_request_behind_an_answer(open_page: Any, width: int) -> None:
    page = open_page("#/chat", width=width, height=900 if width > 1000 else 740)
    keys = Keys(page)
    keys.enter(role(page, "button", QUESTION))
    answered(page)
    # What had the focus is gone, so the next question has it.
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    keys.type("Tell the history of Larkspur Ferries in a long text.")
    keys.press("Enter")
    expect(page.locator(".markdown").nth(1)).not_to_be_empty(timeout=60_000)
    keys.press("Escape")
    expect(page.locator(".reply .badge", has_text="stopped")).to_be_visible()
    keys.enter(page.get_by_role("button", name="Source 2:").first, back=True)
    expect(page.locator(".source").nth(1)).to_be_focused()
    keys.check()
    keys.enter(page.get_by_role("link", name="Details of this request").first, back=True)
    page.wait_for_url("**/#/requests/chatcmpl-*")
    expect(page.locator(".prompt-map span").first).to_be_visible()
    keys.press("g", "c")
    page.wait_for_url("**/#/chat")
    keys.enter(page.get_by_role("button", name="Retry with these settings").first)
    answered(page)
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    keys.enter(role(page, "button", "Answer before"), back=True)
    expect(page.locator(".versions")).to_contain_text("answer 1 of 2")


def test_the_settings_of_an_answer(open_page: Any) -> None:
    page = open_page("#/chat")
    keys = Keys(page)
    keys.to(page.get_by_label("Recompute ratio")).press("ArrowRight")
    expect(page.locator(".ratio b")).to_have_text("0.20")
    keys.space(page.get_by_label("auto (as calibrated)"))
    expect(page.locator(".ratio b")).to_have_text("auto")
    keys.space(page.get_by_label("adaptive (as much as the answer seems to need)"))
    expect(page.locator(".ratio b")).to_have_text("adaptive")
    expect(page.get_by_label("auto (as calibrated)")).not_to_be_checked()
    keys.space(page.get_by_label("Answer from documents"), back=True)
    expect(page.get_by_label("Chunks (k)")).to_be_disabled()
    keys.press("Shift+?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    keys.check()
    keys.press("Escape")
    expect(page.get_by_label("Answer from documents")).to_be_focused()


def test_the_tokens_of_a_request(open_page: Any) -> None:
    trace = synthetic.prompt_trace(400)
    path = "/v1/requests/chatcmpl-synthetic"
    page = open_page("#/connect")
    synthetic.answer_with(
        page,
        {
            path: synthetic.detail(trace),
            f"{path}/trace": synthetic.plain_trace(trace),
            f"{path}/measure": {"full_prefill_s": 2.1, "prompt_tokens": 400},
        },
    )
    page.goto(page.url.split("#")[0] + "#/requests/chatcmpl-synthetic")
    page.locator(".prompt-map span").first.wait_for()
    keys = Keys(page)
    prompt, inspector = page.get_by_role("region", name="Prompt; left and right"), page.locator(".inspector")
    keys.enter(role(page, "button", "Show chunk 2 in the prompt"))
    expect(prompt).to_be_focused()
    expect(inspector).to_contain_text("chunk 2")
    keys.check()
    keys.press("Home", "ArrowRight", "ArrowRight", "ArrowLeft")
    expect(inspector).to_contain_text("Token 2 ")
    keys.press("End")
    expect(inspector).to_contain_text("Token 400 ")
    expect(page.locator("[data-marked]")).to_be_in_viewport()
    keys.enter(role(page, "button", "Layer"), back=True)
    keys.to(page.get_by_role("slider", name="Layer")).press("ArrowRight")
    expect(page.locator(".slider output")).to_have_text(f"layer {synthetic.LAYERS[1]}")
    keys.enter(role(page, "button", "Replay"), back=True)
    keys.space(role(page, "button", "Play"))
    expect(page.locator(".slider output")).to_contain_text("Selection, layer")
    keys.to(page.get_by_role("slider", name="Step")).press("End")
    expect(page.locator(".slider output")).to_contain_text("Recomputation")
    keys.enter(role(page, "button", "Score"), back=True)
    expect(page.locator(".prompt-map .p8").first).to_be_visible()
    keys.enter(role(page, "button", "Measure a full prefill"))
    expect(page.locator(".measured")).to_be_focused()
    keys.to(page.get_by_role("link", name="All requests"), back=True)


def test_documents(open_page: Any, ui_engine: Any, api: httpx.Client) -> None:
    page = open_page("#/documents")
    keys = Keys(page)
    files = page.get_by_label("Files to add")
    with ui_engine.model_lock:
        keys.space(files)
        texts = [f"Pier {number} has a kiosk that sells number {number} of the magazine. " * 5 for number in (1, 2)]
        choose_files(
            page,
            [
                {"name": f"kiosk-{number}.txt", "mimeType": "text/plain", "buffer": text.encode()}
                for number, text in enumerate(texts)
            ],
        )
        expect(page.get_by_label("Chosen files")).to_contain_text("1 chunk (1 new)")
        keys.enter(role(page, "button", "Upload 2 files"))
        expect(files).to_be_focused()
        # The first one may be under way already.
        keys.enter(role(page, "button", "Cancel kiosk-1.txt"))
        resume = role(page, "button", "Resume kiosk-1.txt")
        expect(resume).to_be_focused()
        keys.check()
    keys.enter(resume)
    jobs = page.get_by_role("list", name="Ingestions").get_by_role("listitem")
    for name in ("kiosk-0.txt", "kiosk-1.txt"):
        expect(jobs.filter(has_text=name)).to_contain_text("done")
    keys.enter(page.get_by_role("region", name="Documents").get_by_role("link", name="kiosk-0.txt"))
    pin = role(page, "button", "Pin")
    keys.enter(pin)
    expect(role(page, "button", "Unpin")).to_be_focused()
    keys.to(page.locator(".chunks summary").first).press("Enter")
    keys.enter(page.locator(".document").get_by_role("button", name="Delete"), back=True)
    dialog = page.get_by_role("dialog")
    keys.enter(dialog.get_by_role("button", name="Delete it"))
    page.wait_for_url("**/#/documents")
    expect(page.get_by_role("region", name="Documents").get_by_role("link", name="kiosk-0.txt")).to_have_count(0)
    keys.to(page.get_by_label("Text to check"))
    keys.type("Nobody has stored this text of a few words, which is long enough for a chunk. " * 3)
    keys.enter(role(page, "button", "Check"))
    expect(page.locator(".verdict")).to_contain_text("not ingested")


def test_compare(open_page: Any) -> None:
    page = open_page("#/compare")
    keys = Keys(page)
    keys.to(page.get_by_label("Question or prompt"))
    keys.type("How many passengers?")
    keys.to(page.get_by_label("Answer, at most tokens"))
    keys.press("Control+a")
    keys.type("4")
    keys.enter(role(page, "button", "Leave out way 3"))
    keys.check()
    keys.enter(role(page, "button", "Compare"))
    expect(page.locator(".columns .panel")).to_have_count(2, timeout=90_000)
    expect(role(page, "button", "Compare")).to_be_focused()
    keys.to(page.locator(".columns .told").last)
    keys.enter(role(page, "button", "A set of questions"), back=True)
    keys.to(page.get_by_label("Questions, one on a line"))
    page.wait_for_url("**/#/compare/questions")


def test_requests_operations_and_connect(open_page: Any, ui_url: str) -> None:
    with httpx.Client(base_url=ui_url, timeout=60) as client:
        for content in (QUESTION, "Which fares are there?"):
            body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": content}], "max_tokens": 2}
            client.post("/v1/chat/completions", json=body).raise_for_status()
    page = open_page("#/requests", width=360, height=740)
    keys = Keys(page)
    page.locator("table.requests tbody tr").nth(1).wait_for()
    keys.to(page.get_by_label("Status")).press("ArrowDown")
    page.wait_for_url("**status=ok")
    keys.enter(role(page, "button", "Clear"))
    keys.check()
    page.locator("table.requests tbody tr").nth(1).wait_for()
    for number in range(2):
        keys.space(page.get_by_role("checkbox").nth(number))
    expect(page.get_by_role("row", name="Recompute ratio")).to_be_visible()
    keys.enter(role(page, "button", "Close"), back=True)
    keys.check()
    keys.enter(page.locator("table.requests").get_by_role("link").first)
    page.wait_for_url("**/#/requests/*cmpl-*")
    keys.enter(role(page, "link", "Operations"), back=True)
    page.get_by_role("heading", name="Since the start").wait_for()
    keys.to(page.get_by_label("Recent is the last")).press("ArrowDown")
    keys.space(role(page, "button", "Pause refreshing"))
    expect(role(page, "button", "Go on refreshing")).to_be_focused()
    keys.to(page.get_by_role("region", name="Tenants"))
    keys.enter(role(page, "link", "Connect"), back=True)
    keys.to(page.get_by_role("tab", name="openai")).press("ArrowRight")
    expect(page.get_by_role("tab", name="LangChain")).to_be_focused()
    keys.check()
    keys.enter(page.get_by_role("button", name="Copy"))
    keys.to(page.locator("#snippet pre"))


@pytest.mark.parametrize("screen", ["Compare", "Operations", "Connect"])
def test_the_chosen_screen_is_seen_in_the_navigation(open_page: Any, screen: str) -> None:
    page = open_page(f"#/{screen.lower()}", width=360, height=740)
    chosen = page.get_by_role("navigation", name="Screens").locator("[aria-current]")
    expect(chosen).to_have_text(screen)
    expect(chosen).to_be_in_viewport(ratio=0.99)
    keys = Keys(page)
    keys.press("g", "c")
    expect(role(page, "link", "Chat")).to_be_in_viewport(ratio=0.99)
