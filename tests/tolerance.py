"""How far an operator may be from its reference in float32: absolute and relative, by dtype.

The table in docs/kernels.md has the same numbers; ``tests/kernels/test_docs.py`` compares them.
"""

from __future__ import annotations

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
# Keys are multiplied by two numbers and rounded once.
PLACED = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
LOGITS = {torch.float32: 1e-4}


def assert_near(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, tolerance: dict[torch.dtype, float] = TOLERANCE
) -> None:
    """Compare with a reference computed in float32."""
    allowed = tolerance[dtype]
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=allowed, rtol=allowed)
