"""How far a kernel may be from its reference in float32: absolute and relative, by dtype."""

from __future__ import annotations

import torch

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Compare with a reference computed in float32."""
    torch.testing.assert_close(got.float().cpu(), want.float().cpu(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
