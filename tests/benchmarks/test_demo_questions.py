"""What the benchmark of the demo's questions counts."""

from __future__ import annotations

import pytest
from demo_questions import Record, holds, marks, table


@pytest.mark.parametrize(
    ("answer", "fact", "expected"),
    [
        ("Ferries carry 105 per cent.", "105", True),
        ("It is 105.", "105", True),
        ("The answer is: 10.5%", "105", False),
        ("It is 1050 or 1,105.", "105", False),
        ("The fare is £14.50, or £14.5", "£14.50", True),
        ("It starts at 21:45.", "1:45", False),
        ("From 8 to 28 January", "8 to 28", True),
    ],
)
def test_a_fact_is_a_whole_number(answer: str, fact: str, expected: bool) -> None:
    assert holds(answer, fact) is expected


def test_agreement_is_plain_transformers_words_and_only_where_it_is_right_counts() -> None:
    def record(plain: str, fused: str) -> Record:
        return {"question": "How many?", "fact": "12", "answers": {"plain transformers": plain, "ratio 0.3": fused}}

    records = [
        record("She carries 12.", "she carries 12"),
        record("She carries 12.", "12 are carried"),
        record("She carries 13.", "She carries 13."),
        record("She carries 13.", "She carries 12."),
    ]
    assert [marks(one, "ratio 0.3") for one in records] == [(True, True), (True, False), (False, True), (True, False)]
    assert "| ratio 0.3 | 3 | 2 | 1 of 2 |" in table(records)
