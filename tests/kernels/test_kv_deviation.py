"""KV deviation against its reference."""

from __future__ import annotations

import pytest
import torch
from tolerance import TOLERANCE, assert_near

from fused_kv_kernels import kv_deviation
from fused_kv_kernels.reference import kv_deviation_reference


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("shapes", "tokens"),
    [
        (((3, 64), (3, 64)), 40),
        (((1, 80), (1, 80)), 1),
        (((8, 128), (8, 128)), 17),
        (((2, 64), (2, 64)), 0),
        (((1, 48), (3, 128)), 20),
        (((4, 128), (2, 24)), 20),
    ],
    ids=str,
)
def test_equals_reference(
    shapes: tuple[tuple[int, int], tuple[int, int]], tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    stored = [torch.randn(heads, 60, dim, generator=generator).to(device, dtype) for heads, dim in shapes]
    fresh = [torch.randn(heads, 50, dim, generator=generator).to(device, dtype) for heads, dim in shapes]
    fresh_rows = torch.randperm(50, generator=generator)[:tokens].sort().values.to(device)
    # A column of a table, as torch.nonzero gives it.
    stored_rows = torch.randperm(60, generator=generator)[:tokens].sort().values.to(device)[:, None].repeat(1, 2)[:, 0]
    got = kv_deviation(*fresh, *stored, fresh_rows, stored_rows)
    want = kv_deviation_reference(*(x.float() for x in (*fresh, *stored)), fresh_rows, stored_rows)
    assert_near(got, want, dtype)


def test_equal_kv_does_not_deviate(device: torch.device) -> None:
    keys, values, rows = torch.randn(2, 5, 64, device=device), torch.randn(2, 5, 64, device=device), torch.arange(5)
    rows = rows.to(device)
    assert torch.equal(kv_deviation(keys, values, keys, values, rows, rows), torch.zeros(5, device=device))
