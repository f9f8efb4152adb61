"""Chat: ask, cite, stop, retry with other settings, fork, export; what is said stays text."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from server.documents import ended
from ui.conftest import QUESTION
from ui.looking import documented, is_wider_than_window, photographed, violations
from waiting import wait_until

SCRIPTED = "<img src=x onerror=\"document.title='broken'\"> **bold** <script>document.title='broken'</script> [1]"


def settled(page: Any) -> None:
    """Wait until no answer is under way."""
    expect(page.get_by_role("button", name="Ask", exact=True)).to_be_visible(timeout=60_000)


def asked(page: Any, question: str) -> None:
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")


def answered_with(page: Any, text: str, **report: Any) -> None:
    """Have the browser get this answer."""
    zeros = dict.fromkeys(["prompt_tokens", "prefix_tokens", "reused_tokens", "recomputed_tokens", "fresh_tokens"], 0)
    told = {**zeros, "verdicts": [], "seconds": {}, "bytes_loaded": {}, "ttft_s": 0.1, **report}
    chunks = [
        {"id": "chatcmpl-1", "choices": [{"delta": {"content": text}, "finish_reason": None}]},
        {"id": "chatcmpl-1", "choices": [{"delta": {}, "finish_reason": "stop"}], "fused_kv": told},
    ]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))


def test_a_prepared_question_is_answered_with_its_sources_and_costs(open_page: Any, axe_source: str) -> None:
    page = open_page("#/chat")
    page.get_by_role("button", name=QUESTION).wait_for()
    photographed(page, "chat-empty")
    page.get_by_role("button", name=QUESTION).click()
    settled(page)
    answer = page.locator(".reply")
    expect(answer.locator(".markdown")).not_to_be_empty()
    footer = answer.locator("footer")
    expect(footer.get_by_role("img", name="Tokens: prefix")).to_be_visible()
    expect(footer).to_contain_text("First token")
    expect(footer).to_contain_text("tokens/s")
    cards = page.get_by_label("Settings and sources").locator(".source")
    expect(cards).to_have_count(4)
    expect(cards.first).to_contain_text("Aldebaran")
    expect(cards.first).to_contain_text("01-fleet.txt")
    expect(cards.first).to_contain_text("score")
    answer.get_by_role("button", name="Source 2").click()
    expect(cards.nth(1)).to_be_focused()
    assert violations(page, axe_source) == []
    photographed(page, "chat")
    documented(page, "chat")
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_text("Sources (4)").click()
    assert not is_wider_than_window(page)
    assert violations(page, axe_source) == []
    page.reload()
    expect(page.locator(".reply .markdown")).not_to_be_empty()


def test_escape_stops_an_answer_and_another_ratio_makes_another(open_page: Any) -> None:
    page = open_page("#/chat")
    page.get_by_role("button", name=QUESTION).wait_for()
    page.keyboard.press("/")
    expect(page.get_by_label("Question", exact=True)).to_be_focused()
    page.get_by_label("Longest answer, tokens").fill("100")
    asked(page, "Tell the history of Larkspur Ferries in a long text.")
    expect(page.locator(".markdown")).not_to_be_empty(timeout=60_000)
    page.keyboard.press("Escape")
    expect(page.locator(".reply .badge", has_text="stopped")).to_be_visible()
    page.get_by_label("Longest answer, tokens").fill("8")
    page.get_by_label("Recompute ratio").fill("1")
    page.get_by_role("button", name="Retry with these settings").click()
    settled(page)
    expect(page.locator(".versions")).to_contain_text("answer 2 of 2")
    expect(page.locator(".reply footer")).to_contain_text("ratio 1")
    expect(page.locator(".source .badge").first).to_have_text("recomputed")
    page.get_by_role("button", name="Answer before").click()
    expect(page.locator(".reply .badge", has_text="stopped")).to_be_visible()


def test_a_fork_has_the_turns_before_and_goes_its_own_way(open_page: Any) -> None:
    page = open_page("#/chat")
    answered_with(page, "one")
    asked(page, "first")
    settled(page)
    asked(page, "second")
    settled(page)
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Fork from here").first.click()
    expect(page.locator(".turn")).to_have_count(1)
    page.get_by_label("Conversation", exact=True).select_option(label="first")
    expect(page.locator(".turn")).to_have_count(2)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert "## second" in Path(download.value.path()).read_text()


def test_what_a_model_writes_stays_text(open_page: Any) -> None:
    page = open_page("#/chat")
    found = {"document_id": "x", "name": SCRIPTED, "chunk": 0, "score": 0.1}
    page.expected_errors.append("404")
    answered_with(page, f"{SCRIPTED} [link](javascript:alert(1))", retrieved=[found])
    asked(page, SCRIPTED)
    settled(page)
    answer = page.locator(".reply")
    expect(answer.locator(".markdown")).to_contain_text("<img src=x")
    expect(answer.locator("strong").first).to_have_text("bold")
    expect(page.locator("main img, main script")).to_have_count(0)
    assert page.locator(".markdown a").count() == page.locator(".markdown a:not([href])").count()
    expect(answer).to_contain_text("Low relevance")
    page.locator(".markdown").get_by_role("button", name="Source 1").click()
    expect(page.locator(".source").first).to_be_focused()
    assert "broken" not in page.title()


def test_words_that_no_chunk_holds_are_underlined(open_page: Any, ui_url: str) -> None:
    page = open_page("about:blank")
    told = httpx.get(f"{ui_url}/v1/ui").json()
    # What is made up here is not among the server's requests.
    page.route("**/v1/ui", lambda route: route.fulfill(json={**told, "paths": ["/v1/support"]}))
    page.goto(f"{ui_url}/#/chat")
    found = {"document_id": "x", "name": "a", "chunk": 0, "score": 0.9}
    answered_with(
        page, "It carries 413 people.", retrieved=[found], chunks=[{**found, "text": "It carries 412 people."}]
    )
    asked(page, "How many?")
    settled(page)
    expect(page.locator(".markdown .unsupported")).to_have_text("413")


def test_an_error_is_said_in_words(open_page: Any) -> None:
    page = open_page("#/chat")
    error = {"error": {"message": "Too many requests wait", "type": "server_error", "code": "queue_full"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=429, json=error))
    page.expected_errors.append("429")
    asked(page, "Hello")
    expect(page.get_by_role("alert")).to_have_text("Too many requests wait")


def test_who_waits_is_told_behind_how_many(open_page: Any, ui_engine: Any, ui_url: str) -> None:
    page = open_page("#/chat")
    page.get_by_label("Longest answer, tokens").fill("4")
    body = {"model": "smollm2-135m", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 4}
    with ThreadPoolExecutor(3) as pool:
        with ui_engine.model_lock:
            others = [
                pool.submit(httpx.post, f"{ui_url}/v1/chat/completions", json=body, timeout=120) for _ in range(3)
            ]
            wait_until(lambda: sum(ui_engine.requests.open) == 3, timeout_s=60)
            asked(page, QUESTION)
            # The first one may have begun.
            expect(page.locator(".reply .busy")).to_contain_text(
                re.compile("Waiting in the queue: [23] requests before")
            )
        settled(page)
        assert [other.result().status_code for other in others] == [200] * 3


@pytest.fixture
def scripted_document(ui_url: str) -> Any:
    with httpx.Client(base_url=ui_url, timeout=60) as client:
        made = client.post("/v1/documents", json={"name": SCRIPTED, "text": f"{SCRIPTED} The zebra is striped."}).json()
        assert ended(client, made["job_id"])["state"] == "done"
        yield made
        client.delete(f"/v1/documents/{made['id']}")


def test_documents_and_their_names_stay_text(open_page: Any, scripted_document: Any) -> None:
    page = open_page("#/chat")
    page.get_by_label("Longest answer, tokens").fill("4")
    asked(page, "Is the zebra striped?")
    settled(page)
    card = page.locator(".source").first
    expect(card).to_contain_text("<script>")
    expect(page.locator("main img, main script")).to_have_count(0)
    assert "broken" not in page.title()
