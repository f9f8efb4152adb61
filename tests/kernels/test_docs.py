"""docs/kernels.md describes every operator (its examples are run with those of all pages)."""

from __future__ import annotations

from pathlib import Path

import fused_kv_kernels

PAGE = Path(__file__).parents[2] / "docs" / "kernels.md"


def test_every_operator_is_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not {name for name in fused_kv_kernels.__all__ if name not in text} - {
        "TransferPlan",
        "why_not_native",
        "MOST_SEGMENTS",
        "SHORTEST_NBYTES",
        "STRIPE_NBYTES",
        "native_piece_reader",
    }
