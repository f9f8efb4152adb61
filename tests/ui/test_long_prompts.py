"""The prompt of a request of thousands of tokens: soon there, soon recoloured, and never frozen."""

from __future__ import annotations

import os
from typing import Any

import pytest
from ui import synthetic

# A shared machine is slower than the one that the bounds are for; see `make test-ui`.
SLACK = float(os.environ.get("FUSED_KV_UI_SLACK", "1"))

VIEWS = ("Score", "Layer", "Replay", "State")
REPEATS = 6

# From the arrival of a request's data to the frame after the click that it lets happen.
SHOWN = """async () => {
  await document.fonts.ready;
  const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  const begun = performance.getEntriesByType('resource').filter(one => one.name.endsWith('/trace')).at(-1).responseEnd;
  await frame();
  return (window.mapShown ?? performance.now()) - begun;
}"""
# Observes from the first script on when the map gets its first tokens.
WATCH = """new MutationObserver(() => {
  if (window.mapShown || !document.querySelector('.prompt-map span')) return;
  requestAnimationFrame(() => setTimeout(() => { window.mapShown = performance.now(); }, 0));
}).observe(document, {childList: true, subtree: true});
window.longest = 0;
new PerformanceObserver(list => {
  for (const one of list.getEntries()) window.longest = Math.max(window.longest, one.duration);
}).observe({type: 'longtask'});"""
RECOLOUR = """async name => {
  const button = [...document.querySelectorAll('.views button')].find(one => one.textContent === name);
  const begun = performance.now();
  button.click();
  await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  return performance.now() - begun;
}"""
SCROLL = """async () => {
  const map = document.querySelector('.prompt-map');
  for (let top = 0; top < map.scrollHeight; top += 800) {
    map.scrollTop = top;
    await new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)));
  }
}"""


def _opened(open_page: Any, tokens: int) -> Any:
    trace = synthetic.prompt_trace(tokens, chunks=tokens // 250)
    page = open_page("#/connect")
    synthetic.answer_with(
        page,
        {
            "/v1/requests/chatcmpl-synthetic": synthetic.detail(trace),
            "/v1/requests/chatcmpl-synthetic/trace": synthetic.plain_trace(trace),
        },
    )
    page.add_init_script(WATCH)
    page.goto(page.url.split("#")[0] + "?long#/requests/chatcmpl-synthetic")
    page.locator(".prompt-map span").first.wait_for()
    return page


def _measured(open_page: Any, tokens: int) -> dict[str, float]:
    """Open a long prompt, recolour it, scroll through it, and recolour it once more; milliseconds."""
    page = _opened(open_page, tokens)
    took = {"shown": page.evaluate(SHOWN)}
    took |= {f"first {name}": page.evaluate(RECOLOUR, name) for name in VIEWS}
    page.evaluate(SCROLL)
    # Now every token is an element of its own.
    took |= {f"then {name}": page.evaluate(RECOLOUR, name) for name in VIEWS}
    took["longest task"] = page.evaluate("window.longest")
    assert page.locator(".prompt-map .prompt-body > span").count() == tokens
    page.close()
    return took


@pytest.mark.parametrize(("tokens", "shown_ms"), [(8_000, 300), (32_000, 1200)])
def test_a_long_prompt_is_shown_and_recoloured_at_once(open_page: Any, tokens: int, shown_ms: float) -> None:
    # What else the machine does can only add to a time: the least of a few is the prompt's own.
    bounds = dict.fromkeys((f"{when} {view}" for when in ("first", "then") for view in VIEWS), 100.0)
    bounds |= {"shown": shown_ms, "longest task": shown_ms}
    least: dict[str, float] = {}
    for _ in range(REPEATS):
        took = _measured(open_page, tokens)
        least = {name: min(ms, least.get(name, ms)) for name, ms in took.items()}
        if all(least[name] < SLACK * bound for name, bound in bounds.items()):
            break
    print(f"{tokens} tokens: {least}")
    assert {name: ms for name, ms in least.items() if ms >= SLACK * bounds[name]} == {}
