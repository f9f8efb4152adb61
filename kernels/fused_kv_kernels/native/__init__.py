"""Native CPU operators for bfloat16, compiled on the machine that runs them."""

from __future__ import annotations

from .library import native_library, why_not_native
from .operators import (
    native_place_chunks,
    native_row_attention,
    native_shift_chunks,
    native_token_scores,
    native_transfer,
    row_attention_scratch,
    supports,
)

__all__ = [
    "native_library",
    "native_place_chunks",
    "native_row_attention",
    "native_shift_chunks",
    "native_token_scores",
    "native_transfer",
    "row_attention_scratch",
    "supports",
    "why_not_native",
]
