"""A set of questions in several ways: what is asked, how far it is, what is recommended, and how it is stopped."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import expect
from ui.conftest import QUESTION
from ui.looking import documented, is_wider_than_window, photographed, violations

QUESTIONS = ["Which ships are there?", "When was the company founded?", "What does a ticket cost?"]


def _answering(route: Any) -> None:
    """Answer as a server whose answers agree the better the more is recomputed; one question is not taken."""
    body = route.request.post_data_json
    if "founded" in body["messages"][0]["content"]:
        error = {"error": {"message": "The prompt is too long", "code": "context_length_exceeded"}}
        route.fulfill(status=400, json=error)
        return
    columns = [
        {
            **way,
            "answer": "412",
            "ttft_s": 0.1 + way["recompute_ratio"],
            "report": {},
            "kl": 0.4 * (0.3 - way["recompute_ratio"]),
            "agreement": min(1.0, 0.9 + 0.4 * way["recompute_ratio"]),
            "first_difference": None,
        }
        for way in body["columns"]
    ]
    route.fulfill(json={"columns": columns, "reference": {"answer": "412", "ttft_s": 1.0}})


def test_a_ratio_is_recommended(open_page: Any, axe_source: str) -> None:
    page = open_page("#/compare")
    page.expected_errors.append("400")
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request) if "/v1/compare" in request.url else None)
    page.route("**/v1/compare", _answering)
    page.get_by_role("button", name="A set of questions").click()
    lines = "\n".join([json.dumps({"question": QUESTIONS[0], "answers": []}), *QUESTIONS])
    page.get_by_label("Or take them from a file").set_input_files(
        {"name": "set.jsonl", "mimeType": "text/plain", "buffer": lines.encode()}
    )
    expect(page.get_by_label("Questions, one on a line")).to_have_value("\n".join(QUESTIONS))
    page.get_by_role("button", name="Add a way").click()
    page.get_by_role("button", name="Calibrate").click()
    # 0.9 + 0.4 x 0.15 is the first that reaches 95 %.
    expect(page.get_by_text("Take sink_attention 0.15: 96 % of the tokens")).to_be_visible()
    expect(page.get_by_text("0.25 s instead of 1.00 s, 4.0 times as soon")).to_be_visible()
    expect(page.get_by_text("2 questions are few")).to_be_visible()
    expect(page.get_by_text("1 question was not taken")).to_contain_text("The prompt is too long")
    # Five ways do not go into one request.
    assert [len(request.post_data_json["columns"]) for request in asked] == [4, 1, 4, 4, 1]
    expect(page.get_by_role("region", name="Ways by quality and time").get_by_role("row")).to_have_count(7)
    expect(page.get_by_role("img", name="Agreement over time")).to_be_visible()
    assert violations(page, axe_source) == []
    photographed(page, "compare-questions")
    photographed(page, "compare-recommended", page.get_by_role("heading", name="Recommendation"))
    page.set_viewport_size({"width": 360, "height": 740})
    assert not is_wider_than_window(page)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.get_by_label("Wanted agreement").fill("100")
    page.get_by_label("Wanted agreement").press("Tab")
    expect(page.get_by_text("Take sink_attention 0.3: 100 %")).to_be_visible()
    page.get_by_label("Wanted agreement").fill("90")
    page.get_by_label("Wanted agreement").press("Tab")
    page.get_by_role("button", name="Use it in Chat").click()
    page.get_by_role("link", name="Chat").click()
    expect(page.locator(".ratio b")).to_have_text("0.00")


def test_it_is_stopped_and_leaves_what_is_known(open_page: Any) -> None:
    page = open_page("#/compare/questions")
    held: list[Any] = []

    def second_one_hangs(route: Any) -> None:
        held.append(route)
        if len(held) == 1:
            _answering(route)

    page.route("**/v1/compare", second_one_hangs)
    page.get_by_label("Questions, one on a line").fill(f"{QUESTIONS[0]}\n{QUESTIONS[2]}")
    page.get_by_role("button", name="Calibrate").click()
    expect(page.get_by_text("Question 2 of 2")).to_be_visible()
    expect(page.get_by_role("progressbar", name="Questions answered")).to_have_attribute("value", "0.5")
    page.keyboard.press("Escape")
    expect(page.get_by_text("Stopped after 1 question of 2")).to_be_visible()
    expect(page.get_by_role("heading", name="Recommendation")).to_be_visible()


def test_what_is_no_question_is_said(open_page: Any) -> None:
    page = open_page("#/compare/questions")
    page.get_by_label("Questions, one on a line").fill('Which ships are there?\n{"text": "none"}')
    page.get_by_role("button", name="Calibrate").click()
    expect(page.get_by_role("alert")).to_contain_text("Line 2 begins with")


def test_the_server_is_asked(open_page: Any) -> None:
    page = open_page("#/compare/questions")
    page.get_by_label("Questions, one on a line").fill(f"{QUESTION}\nWhich fares are there for dogs?")
    page.get_by_label("Answer, at most tokens").fill("6")
    page.get_by_role("button", name="Calibrate").click()
    expect(page.get_by_role("heading", name="Recommendation")).to_be_visible(timeout=120_000)
    rows = page.get_by_role("region", name="Ways by quality and time").get_by_role("row")
    expect(rows).to_have_count(6)
    expect(rows.nth(1)).to_contain_text("full prefill")
    page.get_by_role("heading", name="Recommendation").evaluate("heading => heading.scrollIntoView()")
    documented(page, "compare-questions")
