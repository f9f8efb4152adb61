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
    values: tuple[int, int] | None = None,
    interleaved: bool = False,
) -> None:
    heads, dim, rotary = shape
    shapes = (heads, dim), values or (heads, dim)
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths) + len(lengths) + 1
    layer = [torch.randn(h, total, d, generator=generator).to(dtype) for h, d in shapes]
    plain = [part.float() for part in layer]
    want = [part.clone() for part in plain]
    shifts, at, deltas = [], 1, deltas[: len(lengths)]
    for number, count in enumerate(lengths):
        pairs = [
            (
                torch.randint(-127, 128, (3, h, count + cut + 2, d), generator=generator, dtype=torch.int8),
                torch.rand(3, h, count + cut + 2, 1, generator=generator) / 127,
            )
            for h, d in shapes
        ]
        inside, weight = slice(cut, cut + count), 0.5 / (number + 1)
        shifts.append(ChunkShift(at, inside, weight, pairs[0], pairs[1]))
        change = [weight * (whole.float() * scale)[2, :, inside] for whole, scale in pairs]
        turns = torch.full((count,), deltas[number])
        want[0][:, at : at + count] += rerotate_keys_reference(change[0], turns, inv_freq, interleaved)
        want[1][:, at : at + count] += change[1]
        at += count + 1
    got = [part.to(device, copy=True) for part in layer]
    table = rotation_table(torch.tensor(deltas), inv_freq, interleaved).to(device)
    other = rotation_table(torch.zeros(len(deltas)), inv_freq, not interleaved).to(device)
    stacked = [part.clone() for part in got]
    shift_chunks(shifts, 2, table, *got)
    stack = ShiftStack(shifts, [other, other, table])
    stack.add(2, *stacked)
    assert all(map(torch.equal, stacked, got))
    _assert_both_near(got, want, dtype)
    stack.weights = torch.stack((2 * stack.weights[0], -stack.weights[1]))
    again = [part.to(device, copy=True) for part in layer]
    stack.add(2, *again)
    _assert_both_near(again, [2 * want[0] - plain[0], 2 * plain[1] - want[1]], dtype)


def _assert_both_near(got: list[torch.Tensor], want: list[torch.Tensor], dtype: torch.dtype) -> None:
    for part, expected in zip(got, want, strict=True):
        assert_near(part, expected, dtype)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    cut=st.integers(0, 3),
    deltas=st.lists(st.integers(-3000, 3000), min_size=4, max_size=4),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 32), (2, 65, 6)]),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([None, (1, 128), (4, 24)]),
    interleaved=st.booleans(),
)
def test_equals_the_formula(
    lengths: list[int],
    cut: int,
    deltas: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    values: tuple[int, int] | None,
    interleaved: bool,
) -> None:
    _compare(lengths, cut, deltas, shape, dtype, torch.device("cpu"), values, interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "shape", "values", "interleaved"),
    [
        ([70, 1, 33], (2, 64, 64), None, False),
        ([5], (1, 80, 80), None, True),
        ([0, 40], (3, 96, 32), None, False),
        ([32], (1, 256, 256), None, False),
        ([9, 40], (3, 96, 32), (1, 128), True),
        ([20], (1, 64, 64), (2, 24), False),
    ],
    ids=["three_chunks", "dim_80", "partial_rotary_and_an_empty_one", "dim_256", "wide_values", "more_values"],
)
def test_triton_equals_the_formula(
    lengths: list[int],
    shape: tuple[int, int, int],
    values: tuple[int, int] | None,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    _compare(lengths, 2, [5, -3000, 800], shape, dtype, device, values, interleaved)


def test_no_shift_changes_nothing() -> None:
    layer = torch.ones(2, 1, 4, 8)
    shift_chunks([], 0, RotationTable(torch.empty(0, 4), torch.empty(0, 4)), layer[0], layer[1])
    ShiftStack([], []).add(0, layer[0], layer[1])
    assert torch.equal(layer, torch.ones(2, 1, 4, 8))
