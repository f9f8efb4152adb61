"""What tests of the UI look at on every screen: accessibility, and pictures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SIZES = {"1440": (1440, 900), "768": (768, 1024), "360": (360, 740)}
DOCS = Path(__file__).parents[2] / "docs/images"


def violations(page: Any, axe_source: str) -> list[str]:
    """Return what axe finds wrong with a page, each with its elements."""
    # Evaluated by the tests' protocol, which the page's policy does not hold up.
    page.evaluate(axe_source)
    found = page.evaluate("async () => (await axe.run(document, {resultTypes: ['violations']})).violations")
    return [f"{one['id']}: {[node['html'][:160] for node in one['nodes'][:4]]}" for one in found]


def is_wider_than_window(page: Any) -> bool:
    """Whether a page, or the screen in it, has to be scrolled to the side."""
    parts = "[document.documentElement, ...document.querySelectorAll('main')]"
    return bool(page.evaluate(f"{parts}.some(one => one.scrollWidth > one.clientWidth + 1)"))


def choose_files(page: Any, files: Any) -> None:
    """Give files to the dialog that the page has opened, or is about to."""
    for _ in range(400):
        if page.choosers:
            break
        page.wait_for_timeout(50)
    page.choosers.pop().set_files(files)


def photographed(page: Any, name: str, shown: Any = None) -> None:
    """Keep pictures of a view at every width, light and dark, where FUSED_KV_PICTURES names a folder.

    With a locator for `shown` each is scrolled until that stands at the top.
    """
    folder = os.environ.get("FUSED_KV_PICTURES")
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    before = page.viewport_size
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        for size, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            if shown is not None:
                shown.evaluate("element => element.scrollIntoView()")
            page.screenshot(path=f"{folder}/ui-{name}-{size}-{scheme}.png")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size(before)


def documented(page: Any, name: str) -> None:
    """Make the picture of a view for the documentation, where FUSED_KV_DOC_PICTURES is set."""
    if not os.environ.get("FUSED_KV_DOC_PICTURES"):
        return
    from PIL import Image

    DOCS.mkdir(exist_ok=True)
    before, path = page.viewport_size, DOCS / f"ui-{name}.png"
    page.set_viewport_size({"width": 1280, "height": 800})
    page.screenshot(path=path)
    page.set_viewport_size(before)
    # A palette is enough for a page, and a third of the bytes.
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
