"""What was asked: the list with its filters, two compared, and one request with its prompt, chunks and costs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from ui import synthetic
from ui.looking import documented, is_wider_than_window, photographed, violations

QUESTION = "How many passengers can the Aldebaran carry?"


def _answered(client: httpx.Client, content: str, **options: Any) -> str:
    """Ask, and return the request's id."""
    messages = [{"role": "user", "content": content}]
    body = {"model": "smollm2-135m", "messages": messages, "max_tokens": 8, "temperature": 0, "fused_kv": options}
    return str(client.post("/v1/chat/completions", json=body).raise_for_status().json()["id"])


@pytest.fixture(scope="module")
def asked(ui_url: str) -> dict[str, str]:
    """Ids of three requests: one of stored chunks, one computed in full, one whose chunk nobody has ingested."""
    strange = "The winter timetable of the ferry to Norrland, which nobody has ingested yet. " * 4
    with httpx.Client(base_url=ui_url, timeout=120) as client:
        return {
            "reused": _answered(client, QUESTION, retrieve={"k": 3}),
            "full": _answered(client, QUESTION, retrieve={"k": 3}, recompute_ratio=1.0),
            "missed": _answered(client, f"{strange}\n\n{QUESTION}", expected=[strange]),
        }


def test_a_request_shows_its_prompt_by_state(open_page: Any, axe_source: str, asked: dict[str, str]) -> None:
    page = open_page(f"#/requests/{asked['reused']}")
    expect(page.locator(".request-head .asked")).to_contain_text(QUESTION)
    expect(page.locator(".prompt-map .in-chunk")).to_have_count(3)
    expect(page.get_by_text("3 in all, all reused.")).to_be_visible()
    expect(page.locator(".chunk")).to_have_count(3)
    # Tokens are painted once they are seen to be near the window, which may be frames later.
    expect(page.locator(".prompt-map .p2").nth(3)).to_be_attached()
    # The screen scrolls, the page around it does not.
    assert page.evaluate("document.documentElement.scrollHeight <= innerHeight")
    page.get_by_role("button", name="Measure a full prefill").click()
    expect(page.locator(".measure .timeline")).to_contain_text("full prefill", timeout=60_000)
    page.locator("main").evaluate("main => main.scrollTo(0, 0)")
    documented(page, "request")
    page.get_by_role("button", name="Show chunk 2 in the prompt").click()
    expect(page.locator(".prompt-map")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".inspector")).to_contain_text("chunk 2")
    assert violations(page, axe_source) == []
    photographed(page, "request")


def test_the_replay_goes_step_by_step_without_motion(open_page: Any, asked: dict[str, str]) -> None:
    page = open_page(f"#/requests/{asked['reused']}")
    page.get_by_role("button", name="Replay").click()
    page.get_by_role("button", name="Play", exact=True).click()
    output = page.locator(".slider output")
    expect(output).to_contain_text("Chosen for recomputation")
    expect(page.locator(".prompt-map .p1").nth(3)).to_be_attached()
    page.get_by_role("slider", name="Step").press("End")
    expect(output).to_contain_text("Recomputation")
    expect(page.locator(".prompt-map .p1")).to_have_count(0)
    expect(page.locator(".prompt-map .p9").nth(3)).to_be_attached()


def test_a_chunk_that_nobody_ingested_has_its_remedy(open_page: Any, asked: dict[str, str]) -> None:
    page = open_page(f"#/requests/{asked['missed']}")
    lost = page.locator(".chunk", has_text="Norrland")
    expect(lost).to_contain_text("not ingested")
    expect(lost).to_contain_text("What helps")
    # Only its beginning is known, which nobody wants to have ingested.
    expect(lost.get_by_role("button")).to_have_count(0)


def test_a_chunk_whose_kv_was_deleted_is_mended(open_page: Any, ui_engine: Any, ui_url: str) -> None:
    with httpx.Client(base_url=ui_url, timeout=120) as client:
        before = client.get(f"/v1/requests/{_answered(client, QUESTION, retrieve={'k': 3})}").json()
        ui_engine.delete_chunks([before["chunks"][0]["text"]])
        page = open_page(f"#/requests/{_answered(client, QUESTION, retrieve={'k': 3})}")
        lost = page.locator(".chunk").first
        expect(lost).to_contain_text("deleted")
        lost.get_by_role("button", name="Store it again").click()
        expect(lost.get_by_role("status")).to_contain_text("Stored", timeout=20_000)
        after = client.get(f"/v1/requests/{_answered(client, QUESTION, retrieve={'k': 3})}").json()
    assert {verdict["outcome"] for verdict in after["report"]["verdicts"]} == {"reused"}


def test_requests_are_filtered_and_two_compared(open_page: Any, axe_source: str, asked: dict[str, str]) -> None:
    page = open_page("#/requests")
    rows = page.locator("table.requests tbody tr")
    rows.nth(2).wait_for()
    page.get_by_label("A chunk was").select_option("not_ingested")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Clear").click()
    expect(rows.nth(2)).to_be_visible()
    documented(page, "requests")
    boxes = page.get_by_role("checkbox", name=f"Compare “{QUESTION}")
    boxes.nth(0).check()
    boxes.nth(1).check()
    expect(page.get_by_role("row", name="Recompute ratio")).to_contain_text("0.15")
    assert violations(page, axe_source) == []
    photographed(page, "requests")


def test_nothing_in_a_request_is_markup(open_page: Any) -> None:
    trace = synthetic.prompt_trace(300, chunks=2)
    shown = synthetic.detail(trace)
    evil = '<img src=x onerror="document.title=1"><script>document.title=1</script>'
    shown |= {"question": evil, "answer": evil, "model": evil, "selector": evil, "status": evil}
    shown["report"]["warnings"] = [evil]
    plain = synthetic.plain_trace(trace)
    plain["text"] = evil + plain["text"][len(evil) :]
    path = "/v1/requests/chatcmpl-synthetic"
    page = open_page("#/connect")
    synthetic.answer_with(
        page, {path: shown, f"{path}/trace": plain, "/v1/requests?": {"data": [shown], "has_more": False}}
    )
    for view in ("requests/chatcmpl-synthetic", "requests"):
        page.goto(page.url.split("#")[0] + f"#/{view}")
        page.get_by_text(evil).first.wait_for()
        assert page.locator("main img, main script").count() == 0


@pytest.mark.parametrize("view", ["chatcmpl-synthetic"])
def test_a_request_fits_a_telephone(open_page: Any, axe_source: str, view: str) -> None:
    trace = synthetic.prompt_trace(400)
    page = open_page("#/connect", width=360, height=740, dark=True)
    path = f"/v1/requests/{view}"
    synthetic.answer_with(page, {path: synthetic.detail(trace), f"{path}/trace": synthetic.plain_trace(trace)})
    page.goto(page.url.split("#")[0] + f"#/requests/{view}")
    page.locator(".prompt-map span").first.wait_for()
    for name in ("Score", "Layer", "Replay"):
        page.get_by_role("button", name=name, exact=True).click()
        assert not is_wider_than_window(page)
    assert violations(page, axe_source) == []
