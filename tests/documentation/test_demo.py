"""How many answers stay the same, in docs/demo.md, is what the record says."""

from __future__ import annotations

import re

from .records import RESULTS, prose, table

PAGE = "docs/demo.md"


def counts(name: str) -> dict[str, tuple[int, int]]:
    """Return, by ratio, how many answers agree, and in how many of them where plain transformers' holds the fact."""
    text = (RESULTS / name).read_text(encoding="utf-8")
    rows = re.findall(r"\| ratio ([\d.]+) \| \d+ \| (\d+) \| (\d+) of 19 \|", text)
    return {ratio: (int(same), int(right)) for ratio, same, right in rows}


def test_the_demo_questions() -> None:
    now, before = counts("demo_questions_cpu.md"), counts("demo_questions_earlier_layers_cpu.md")
    assert table(PAGE, "ratio") == [[ratio, str(right)] for ratio, (_, right) in now.items()]
    same = [same for same, _ in now.values()]
    assert "In {}, {} and {} of all 36 the answers are the same words.".format(*same) in prose(PAGE)
    right = [right for _, right in before.values()]
    assert "{}, {} and {} held the number in the same words".format(*right) in prose(PAGE)
