"""docs/kernels.md describes every operator and its tolerances (its examples are run with those of all pages)."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from tolerance import LOGITS, PLACED, TOLERANCE

import fused_kv_kernels

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_every_operator_is_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not {name for name in fused_kv_kernels.__all__ if name not in text} - {
        "TransferPlan",
        "why_not_native",
    }


def test_tolerances_are_those_of_the_tests() -> None:
    rows = [line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    heads = [number for number, row in enumerate(rows) if row[0].strip() == "tolerance"]
    assert len(heads) == 1
    dtypes = [getattr(torch, name.strip()) for name in rows[heads[0]][1:]]
    table = {
        row[0].strip(): {dtype: float(cell) for dtype, cell in zip(dtypes, row[1:], strict=True) if cell.strip()}
        for row in rows[heads[0] + 2 :]
    }
    assert table == {
        "an operator, against its reference": TOLERANCE,
        "keys that `place_chunks` rotates on a CPU": PLACED,
        "logits of an engine in Triton, against torch": LOGITS,
    }


def test_no_kernel_is_compared_more_loosely() -> None:
    """Numbers that stand in the tests themselves are no wider than the widest of the table."""
    literal = re.compile(r"\b[ar]tol=([0-9.e*-]+)")
    for path in Path(__file__).parent.glob("test_*.py"):
        for number in literal.findall(path.read_text(encoding="utf-8")):
            base, _, exponent = number.partition("**")
            assert float(base) ** float(exponent or 1) <= max(TOLERANCE.values()), (path.name, number)
