"""What the terminal shows of a comparison."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console, RenderableType

from fused_kv_llm.demo import Row, answers, explain, medians, sources, times
from fused_kv_llm.demo.passages import FoundPassage, Passage

LONG = (
    "The Aldebaran can carry 412 passengers and 68 cars on two vehicle decks, and she is the largest vessel [of all]."
)
ROWS = [
    Row("plain transformers", None, 6.0, 1.0, 1800, 1800, LONG),
    Row("no stored KV (ratio 1)", None, 3.0, 2.0, 1800, 1800, LONG),
    Row("fused (ratio 0.3)", 1.5, 1.0, 6.0, 600, 1800, LONG.replace(" can", "  can")),
    Row("full reuse (ratio 0)", 0.3, 0.1, 60.0, 40, 1800, "412."),
]


def shown(renderable: RenderableType, width: int) -> list[str]:
    """Return the lines of a terminal of some width, as they would be written to a file."""
    console = Console(file=StringIO(), width=width)
    console.print(renderable)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [80, 120])
def test_answers_have_the_full_width_and_equal_ones_share_it(width: int) -> None:
    lines = shown(answers(ROWS), width)
    assert lines[0] == "plain transformers, no stored KV (ratio 1), fused (ratio 0.3):"
    assert lines[-2:] == ["full reuse (ratio 0):", "  412."]
    folded = lines[1:-2]
    assert " ".join(line.strip() for line in folded) == LONG
    assert len(folded) == -(-(len(LONG) + 2) // (width - 2))


@pytest.mark.parametrize("width", [80, 120])
def test_times_tell_cold_from_warm(width: int) -> None:
    lines = shown(times(ROWS, "Times"), width)
    assert max(map(len, lines)) <= 80
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert cells == [
        ["plain transformers", "-", "6.00 s", "1.0x", "1,800"],
        ["no stored KV (ratio 1)", "-", "3.00 s", "2.0x", "1,800"],
        ["fused (ratio 0.3)", "1.50 s", "1.00 s", "6.0x", "600"],
        ["full reuse (ratio 0)", "0.30 s", "0.10 s", "60.0x", "40"],
    ]


def test_the_speed_up_is_told_apart_into_operators_and_stored_kv() -> None:
    text = " ".join(shown(explain(ROWS), 400))
    assert "6.0x" in text
    assert "2.0x from faster operators" in text
    assert "3.0x from stored KV" in text


@pytest.mark.parametrize("width", [80, 120])
def test_sources_are_one_line_each(width: int) -> None:
    passages = [
        Passage("The Aldebaran is the flagship [of the fleet].\n" + "She is large. " * 20, "/corpus/ships/fleet.md"),
        Passage("Short.", "/corpus/notes.txt"),
    ]
    lines = shown(sources(passages), width)
    found = shown(sources([FoundPassage("Short.", "/corpus/notes.txt", 0.5012)]), width)
    assert found[1:] == ["  notes.txt (0.50): Short."]
    assert lines[0].startswith("2 passages")
    assert lines[1].startswith("  ships/fleet.md: The Aldebaran is the flagship [of the fleet]. She")
    assert len(lines[1]) == width
    assert lines[2:] == ["  notes.txt: Short."]


def test_medians_of_several_questions() -> None:
    def rows(warm_s: float) -> list[Row]:
        return [Row("plain", None, 6.0, 1.0, 90, 90, "yes"), Row("fused", 2 * warm_s, warm_s, 6 / warm_s, 9, 90, "no")]

    plain, fused = medians([rows(1.0), rows(3.0), rows(2.0)])
    assert (plain.cold_s, plain.warm_s) == (None, 6.0)
    assert (fused.cold_s, fused.warm_s, fused.speedup, fused.answer) == (4.0, 2.0, 3.0, "")
