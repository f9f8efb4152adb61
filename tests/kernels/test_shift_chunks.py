"""Shifts of chunk KV against their formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near

from fused_kv_kernels import ChunkShift, RotationTable, ShiftStack, rotation_table, shift_chunks
from fused_kv_kernels.reference import rerotate_keys_reference

DTYPES = (torch.float32, torch.bfloat16)


def _compare(
    lengths: list[int],
    cut: int,
    deltas: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    heads, dim, rotary = shape
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))
    generator = torch.Generator().manual_seed(sum(lengths))
    layer = torch.randn(2, heads, sum(lengths) + len(lengths) + 1, dim, generator=generator).to(dtype)
    plain = layer.float().clone()
    want = plain.clone()
    shifts, at, deltas = [], 1, deltas[: len(lengths)]
    for number, count in enumerate(lengths):
        pairs = [
            (
                torch.randint(-127, 128, (3, heads, count + cut + 2, dim), generator=generator, dtype=torch.int8),
                torch.rand(3, heads, count + cut + 2, 1, generator=generator) / 127,
            )
            for _ in range(2)
        ]
        inside, weight = slice(cut, cut + count), 0.5 / (number + 1)
        shifts.append(ChunkShift(at, inside, weight, pairs[0], pairs[1]))
        change = [weight * (whole.float() * scale)[2, :, inside] for whole, scale in pairs]
        turns = torch.full((count,), deltas[number])
        want[0, :, at : at + count] += rerotate_keys_reference(change[0], turns, inv_freq)
        want[1, :, at : at + count] += change[1]
        at += count + 1
    got, table = layer.to(device), rotation_table(torch.tensor(deltas), inv_freq).to(device)
    other = rotation_table(torch.zeros(len(deltas)), inv_freq).to(device)
    stacked = got.clone()
    shift_chunks(shifts, 2, table, *got)
    stack = ShiftStack(shifts, [other, other, table])
    stack.add(2, *stacked)
    assert torch.equal(stacked, got)
    assert_near(got, want, dtype)
    # Not contiguous, as a fit may leave them.
    others = torch.stack((2 * stack.weights[0], -stack.weights[1]), dim=1).T
    again = plain.clone().to(device, dtype)
    stack.add(2, *again, others)
    expected = torch.stack((2 * want[0] - plain[0], 2 * plain[1] - want[1]))
    assert_near(again, expected, dtype)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    cut=st.integers(0, 3),
    deltas=st.lists(st.integers(-3000, 3000), min_size=4, max_size=4),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 32)]),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_the_formula(
    lengths: list[int], cut: int, deltas: list[int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    _compare(lengths, cut, deltas, shape, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "shape"),
    [([70, 1, 33], (2, 64, 64)), ([5], (1, 80, 80)), ([0, 40], (3, 96, 32)), ([32], (1, 256, 256))],
    ids=["three_chunks", "dim_80", "partial_rotary_and_an_empty_one", "dim_256"],
)
def test_triton_equals_the_formula(
    lengths: list[int], shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    _compare(lengths, 2, [5, -3000, 800], shape, dtype, device)


def test_no_shift_changes_nothing() -> None:
    layer = torch.ones(2, 1, 4, 8)
    shift_chunks([], 0, RotationTable(torch.empty(0, 4), torch.empty(0, 4)), layer[0], layer[1])
    ShiftStack([], []).add(0, layer[0], layer[1])
    assert torch.equal(layer, torch.ones(2, 1, 4, 8))


def test_weights_of_another_number_of_shifts_are_refused() -> None:
    parts = torch.ones(1, 1, 4, 8, dtype=torch.int8), torch.ones(1, 1, 4, 1)
    stack = ShiftStack(
        [ChunkShift(0, slice(0, 4), 0.5, parts, parts)], [RotationTable(torch.ones(1, 4), torch.zeros(1, 4))]
    )
    layer = torch.zeros(2, 1, 6, 8)
    with pytest.raises(ValueError, match="weights"):
        stack.add(0, layer[0], layer[1], torch.ones(2, 3))
