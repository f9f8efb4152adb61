"""No line of prose is over 120 columns; tables, addresses and what benchmarks write cannot be wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COLUMNS = 120
PAGES = [
    *ROOT.glob("*.md"),
    *(
        path
        for folder in ("docs", "examples", "integrations", "kernels", "src")
        for path in (ROOT / folder).rglob("*.md")
    ),
]


@pytest.mark.parametrize("page", sorted(PAGES), ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_fit(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    long = [
        f"{page.name}:{number}: {len(line)} columns"
        for number, line in enumerate(lines, start=1)
        if len(line) > COLUMNS and not line.startswith("|") and len(line.split()) > 2
    ]
    assert long == []
