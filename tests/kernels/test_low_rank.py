"""Low-rank shifts against the products written out."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_kernels import LowRankShift, add_low_rank, rotation_tables
from fused_kv_kernels.reference import rerotate_keys_reference

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    ranks=st.sampled_from([(1, 1), (3, 3), (8, 8), (2, 5)]),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 32)]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_equals_the_formula(
    lengths: list[int], ranks: tuple[int, int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, dim, rotary = shape
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))
    generator = torch.Generator().manual_seed(sum(lengths))

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) / size[-1] ** 0.5).to(dtype)

    layer = draw(2, heads, sum(lengths) + 2 * len(lengths), dim)
    want = layer.float().clone()
    shifts, at = [], 1
    for number, count in enumerate(lengths):
        rank = ranks[number % 2]
        positions = torch.arange(at + 7, at + 7 + count)
        keys, values = ((draw(3, count, rank), draw(3, heads, rank, dim)) for _ in range(2))
        shifts.append(LowRankShift(at, keys, values, *rotation_tables(positions, inv_freq)))
        product = keys[0][2].float() @ keys[1][2].float()
        want[0, :, at : at + count] += rerotate_keys_reference(product, positions, inv_freq)
        want[1, :, at : at + count] += values[0][2].float() @ values[1][2].float()
        at += count + 1
    add_low_rank(shifts, 2, layer[0], layer[1])
    torch.testing.assert_close(layer.float(), want, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_no_shift_changes_nothing() -> None:
    layer = torch.ones(2, 1, 4, 8)
    add_low_rank([], 0, layer[0], layer[1])
    assert torch.equal(layer, torch.ones(2, 1, 4, 8))
