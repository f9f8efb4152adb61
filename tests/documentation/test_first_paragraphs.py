"""Every page of the documentation begins with a paragraph that says what the page is for."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_a_page_says_first_what_it_is_for(page: Path) -> None:
    title, paragraph, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert title.startswith("# ")
    assert paragraph.startswith("This page ")
    assert len(paragraph.split()) >= 10
