"""What the engine really did with a prompt: its scores, layer by layer, and the replay as it plays by itself."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from playwright.sync_api import expect
from ui.conftest import QUESTION

# The paint of every token that is shown, by its place in the map.
PAINTS = "() => [...document.querySelectorAll('.prompt-body > span')].map(one => Number(one.className.slice(1)))"
PAINTED = "() => [...document.querySelectorAll('.prompt-body')].every(one => one.querySelector('span[class]'))"
# Keeps every caption of the replay, also of steps that nobody looks at in time.
WATCH = """() => {
  const output = document.querySelector('.slider output');
  window.captions = [output.textContent];
  new MutationObserver(() => {
    if (window.captions.at(-1) !== output.textContent) window.captions.push(output.textContent);
  }).observe(output, {childList: true, characterData: true, subtree: true});
}"""


@pytest.fixture
def request_page(open_page: Any, ui_engine: Any) -> Any:
    """A function that asks the prepared question in the chat and opens the request behind the answer."""

    def opened(**options: Any) -> Any:
        # Of a prompt that an earlier one has left, nothing would be chosen.
        ui_engine.clear_prefix_cache()
        # So high that all of the prompt is on the screen, and so painted.
        page = open_page("#/chat", height=6000, **options)
        page.get_by_label("Longest answer, tokens").fill("4")
        page.get_by_role("button", name=QUESTION).click()
        page.get_by_role("link", name="Details of this request").click(timeout=60_000)
        expect(page.locator(".prompt-map .in-chunk").first).to_be_visible()
        # Tokens are painted once they are seen to be near the window, which may be frames later.
        page.wait_for_function(PAINTED)
        return page

    return opened


def _trace(page: Any) -> dict[str, Any]:
    id_ = page.url.rsplit("/", 1)[1]
    return httpx.get(f"{page.ui_url}/v1/requests/{id_}/trace").raise_for_status().json()


def test_scores_are_those_of_the_engine(request_page: Any) -> None:
    page = request_page()
    selection = _trace(page)["selection"]
    states = page.evaluate(PAINTS)
    page.get_by_role("button", name="Score", exact=True).click()
    expect(page.locator(".prompt-map[data-mode=score] .p8").first).to_be_attached()
    scores = page.evaluate(PAINTS)
    of = {state: [paint for paint, one in zip(scores, states, strict=True) if one == state] for state in (1, 2)}
    # What was recomputed is what the selector scored highest.
    assert sum(of[2]) / len(of[2]) > 1.5 * sum(of[1]) / len(of[1])
    page.get_by_role("button", name="Layer", exact=True).click()
    slider, output = page.get_by_role("slider", name="Layer"), page.locator(".slider output")
    seen = [scores]
    assert len(selection["layers"]) > 1
    for layer in selection["layers"]:
        expect(output).to_have_text(f"layer {layer}")
        # Each layer has paints of its own, which come with the next frame.
        page.wait_for_function(f"before => String(({PAINTS})()) !== before", arg=",".join(map(str, seen[-1])))
        seen.append(page.evaluate(PAINTS))
        slider.press("ArrowRight")
    # The strongest fortieth of a layer's scores has the strongest paint.
    of_chunks = [token for token, chunk in enumerate(_trace(page)["chunk"]) if chunk >= 0]
    first_layer = selection["scores"][0]
    assert seen[1][of_chunks[first_layer.index(max(first_layer))]] == 8


def test_the_replay_plays_by_itself_and_pauses(request_page: Any) -> None:
    page = request_page(reduced_motion="no-preference")
    trace = _trace(page)
    page.get_by_role("button", name="Replay", exact=True).click()
    output = page.locator(".slider output")
    page.evaluate(WATCH)
    page.get_by_role("button", name="Play", exact=True).click()
    expect(output).to_contain_text("Chosen for recomputation", timeout=60_000)
    page.get_by_role("button", name="Pause", exact=True).click()
    stopped = output.inner_text()
    page.wait_for_timeout(1500)
    assert output.inner_text() == stopped
    page.get_by_role("button", name="Play", exact=True).click()
    layers = trace["model_layers"]
    expect(output).to_have_text(f"Recomputation: {layers} of {layers} layers", timeout=90_000)
    # It ends by itself.
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()
    captions = page.evaluate("window.captions")
    chosen = [f"Selection, layer {one}: the tokens with the highest scores" for one in trace["selection"]["layers"]]
    assert captions[1 : 1 + len(chosen)] == chosen
    assert captions[-layers:] == [f"Recomputation: {done} of {layers} layers" for done in range(1, layers + 1)]
    states = trace["states"]
    expect(page.locator(".prompt-map .p9")).to_have_count(states.count(2))
    page.get_by_role("button", name="Play", exact=True).click()
    expect(page.locator(".prompt-map .p9")).to_have_count(0)
