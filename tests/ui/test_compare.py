"""One prompt in several ways: which are asked for, where answers part, and what the chart says."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import expect
from ui import synthetic
from ui.looking import documented, is_wider_than_window, photographed, violations

FULL = "The Aldebaran carries 412 passengers and 96 cars."


def _comparison() -> dict[str, Any]:
    trace = synthetic.prompt_trace(300)
    report = synthetic.report(trace, []).to_dict()

    def column(selector: str, ratio: float, answer: str, ttft_s: float, kl: float, agreement: float) -> dict[str, Any]:
        first = None if answer == FULL else 4
        told = {"selector": selector, "recompute_ratio": ratio, "answer": answer, "ttft_s": ttft_s, "report": report}
        return told | {"kl": kl, "agreement": agreement, "first_difference": first}

    return {
        "columns": [
            column("", 1.0, FULL, 2.1, 0.0, 1.0),
            column("sink_attention", 0.15, FULL, 0.42, 0.012, 0.97),
            column("full_reuse", 0.0, "The Aldebaran carries 38 <b>passengers</b>.", 0.12, 0.4, 0.81),
        ],
        "reference": {"answer": FULL, "ttft_s": 2.1},
    }


def test_ways_are_chosen_and_answers_part_where_they_differ(open_page: Any, axe_source: str) -> None:
    page = open_page("#/compare")
    synthetic.answer_with(page, {"/v1/compare": _comparison()})
    page.get_by_label("Question or prompt").fill("How many passengers can the Aldebaran carry?")
    page.get_by_role("button", name="Add a way").click()
    expect(page.get_by_role("button", name="Add a way")).to_have_count(0)
    page.get_by_role("button", name="Leave out way 4").click()
    with page.expect_request("**/v1/compare") as asked:
        page.get_by_role("button", name="Compare", exact=True).click()
    body = asked.value.post_data_json
    assert [way["recompute_ratio"] for way in body["columns"]] == [1, 0.15, 0]
    assert body["retrieve"] == {"k": 4}
    marks = page.locator(".columns mark")
    expect(marks).to_have_count(1)
    expect(marks).to_contain_text("38 <b>passengers</b>.")
    expect(page.get_by_role("img", name="Agreement over time")).to_be_visible()
    assert violations(page, axe_source) == []
    photographed(page, "compare")
    page.set_viewport_size({"width": 360, "height": 740})
    assert not is_wider_than_window(page)


def test_the_server_answers_in_every_way(open_page: Any) -> None:
    page = open_page("#/compare")
    page.get_by_label("Question or prompt").fill("How many passengers can the Aldebaran carry?")
    page.get_by_label("Chunks to retrieve").fill("2")
    page.get_by_label("Answer, at most tokens").fill("8")
    page.get_by_role("button", name="Compare", exact=True).click()
    panels = page.locator(".columns .panel")
    expect(panels).to_have_count(3, timeout=90_000)
    expect(panels.first).to_contain_text("full prefill")
    expect(panels.first.locator("mark")).to_have_count(0)
    expect(panels.first).to_contain_text("100 %")
    expect(page.get_by_role("img", name="Agreement over time")).to_be_visible()
    expect(panels.first.get_by_text("First token")).to_be_visible()
    panels.first.evaluate("panel => panel.scrollIntoView()")
    documented(page, "compare")
    photographed(page, "compare-real")
