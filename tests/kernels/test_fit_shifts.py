"""Fitted weights of shifts against the least squares they stand for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near
from torch import Tensor

from fused_kv_kernels import ChunkShift, RotationTable, ShiftStack, TransferPlan, fit_shifts, rotation_table
from fused_kv_kernels.reference import rerotate_keys_reference

DTYPES = (torch.float32, torch.bfloat16)
DAMPING = 6.0


def _parts(heads: int, rows: int, dim: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    whole = torch.randint(-127, 128, (3, heads, rows, dim), generator=generator, dtype=torch.int8)
    return whole, (torch.rand(3, heads, rows, 1, generator=generator) + 0.2) / 127


def _compare(
    lengths: list[int],
    picks: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    values_shape: tuple[int, int] | None = None,
    interleaved: bool = False,
) -> None:
    """Recomputed rows that moved by a known multiple of the shift, and by noise: least squares finds the multiple."""
    heads, dim, rotary = shape
    shapes = (heads, dim), values_shape or (heads, dim)
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))
    generator = torch.Generator().manual_seed(sum(lengths) + sum(picks))
    total = sum(lengths) + len(lengths) + 1
    layer = [torch.randn(h, total, d, generator=generator).to(dtype) for h, d in shapes]
    shifts, deltas, selected, fresh, want, at = [], [], [], [], [], 1
    for number, count in enumerate(lengths):
        keys, values = (_parts(h, count + 3, d, generator) for h, d in shapes)
        shifts.append(ChunkShift(at, slice(2, 2 + count), 0.8, keys, values))
        deltas.append(37 * number - 20)
        rows = torch.randperm(count, generator=generator)[: picks[number]].sort().values
        pair, weights = [], []
        for is_key, (whole, scale) in ((True, keys), (False, values)):
            moved = (whole.float() * scale)[1, :, 2 : 2 + count][:, rows]
            if is_key:
                moved = rerotate_keys_reference(moved, torch.full((rows.shape[0],), deltas[-1]), inv_freq, interleaved)
            old = layer[0 if is_key else 1][:, at + rows]
            noise = 0.3 * torch.randn(moved.shape, generator=generator)
            new = (old.float() + 0.7 * (number + 1) * moved + noise).to(dtype)
            pair.append(new)
            n, along = rows.shape[0], ((new.float() - old.float()) * moved).sum()
            weights.append(float(along / moved.square().sum() / (1 + DAMPING / n)) if n else 0.0)
        selected.append(at + rows)
        fresh.append(pair)
        want.append(weights)
        at += count + 1
    # Rows of the question come first and last among the fresh ones.
    pads = [torch.randn(h, 2, d, generator=generator).to(dtype) for h, d in shapes]
    rows_of = [torch.cat((pad, *(pair[i] for pair in fresh), pad), dim=1).to(device) for i, pad in enumerate(pads)]
    positions = torch.cat(selected)
    plan = TransferPlan(
        positions.to(device),
        torch.arange(2, 2 + positions.shape[0], device=device),
        torch.tensor([[shift.span.start, shift.span.stop] for shift in shifts], device=device),
        torch.ones(len(shifts), device=device),
    )
    table, other = (
        rotation_table(moves, inv_freq, interleaved).to(device)
        for moves in (torch.tensor(deltas), torch.zeros(len(deltas)))
    )
    stack = ShiftStack(shifts, [other, table, other])
    got = fit_shifts(plan, stack, 1, DAMPING, (rows_of[0], rows_of[1]), (layer[0].to(device), layer[1].to(device)))
    limited = torch.tensor(want).T.clamp(-1.6, 1.6)
    assert_near(got, limited, dtype)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    picks=st.lists(st.integers(0, 12), min_size=4, max_size=4),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 32), (2, 65, 6)]),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([None, (1, 128), (4, 24)]),
    interleaved=st.booleans(),
)
def test_is_damped_least_squares(
    lengths: list[int],
    picks: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    values: tuple[int, int] | None,
    interleaved: bool,
) -> None:
    _compare(lengths, picks, shape, dtype, torch.device("cpu"), values, interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "picks", "shape", "values", "interleaved"),
    [
        ([70, 1, 33], [40, 1, 0], (2, 64, 64), None, False),
        ([5], [5], (1, 80, 80), None, True),
        ([9, 40], [3, 35], (3, 96, 32), None, False),
        ([9, 40], [3, 35], (3, 96, 32), (1, 128), True),
        ([20], [12], (1, 64, 64), (2, 24), False),
    ],
    ids=["three_chunks", "dim_80", "partial_rotary", "wide_values", "more_values"],
)
def test_triton_is_damped_least_squares(
    lengths: list[int],
    picks: list[int],
    shape: tuple[int, int, int],
    values: tuple[int, int] | None,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    _compare(lengths, picks, shape, dtype, device, values, interleaved)


def test_rows_outside_the_layer_are_refused() -> None:
    parts = torch.ones(1, 1, 4, 8, dtype=torch.int8), torch.ones(1, 1, 4, 1)
    stack = ShiftStack(
        [ChunkShift(0, slice(0, 4), 0.5, parts, parts)], [RotationTable(torch.ones(1, 4), torch.zeros(1, 4))]
    )
    plan = TransferPlan(torch.tensor([1, 9]), torch.tensor([0, 1]), torch.tensor([[0, 4]]), torch.ones(1))
    layer = torch.zeros(2, 1, 6, 8).unbind()
    with pytest.raises(ValueError, match="do not fit together"):
        fit_shifts(plan, stack, 0, DAMPING, layer, layer)  # type: ignore[arg-type]


def test_without_shifts_there_is_nothing_to_fit() -> None:
    stack = ShiftStack([], [])
    at = torch.tensor([1])
    plan = TransferPlan(at, torch.tensor([0]), torch.tensor([[0, 4]]), torch.ones(1))
    layer = torch.zeros(2, 1, 6, 8).unbind()
    assert fit_shifts(plan, stack, 0, DAMPING, layer, layer).shape == (2, 0)  # type: ignore[arg-type]
