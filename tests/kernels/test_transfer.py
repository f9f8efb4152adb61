"""Deviation transfer against its formula, one token after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near

from fused_kv_kernels import TransferPlan, deviation_vectors, rotation_table, transfer_deviation
from fused_kv_kernels.reference import rerotate_keys_reference

DTYPES = (torch.float32, torch.bfloat16)
_Pair = Sequence[torch.Tensor]


def _inv_freq(rotary: int) -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))


def _formula(
    plan: TransferPlan, fresh: _Pair, layer: _Pair, inv_freq: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    def turn(key: torch.Tensor, position: int) -> torch.Tensor:
        return rerotate_keys_reference(key[:, None], torch.tensor([position]), inv_freq, interleaved)[:, 0]

    keys, values = (part.float().clone() for part in layer)
    fresh_of = dict(zip(plan.selected.tolist(), plan.fresh_rows.tolist(), strict=True))
    for (start, stop), weight in zip(plan.spans.tolist(), plan.weights.tolist(), strict=True):
        mine = [at for at in fresh_of if start <= at < stop]
        if not mine:
            continue
        delta_k = weight * sum(turn(fresh[0][:, fresh_of[at]].float() - layer[0][:, at].float(), -at) for at in mine)
        delta_v = weight * sum(fresh[1][:, fresh_of[at]].float() - layer[1][:, at].float() for at in mine)
        for at in range(start, stop):
            keys[:, at] += turn(delta_k, at)
            values[:, at] += delta_v
    return keys, values


def _compare(
    lengths: list[int],
    choose: Callable[[list[int]], list[int]],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    values: tuple[int, int] | None = None,
    interleaved: bool = False,
) -> None:
    heads, dim, rotary = shape
    shapes = (heads, dim), values or (heads, dim)
    edges = torch.tensor([0, *lengths]).cumsum(0)
    # One position of fresh text between two chunks.
    spans = torch.stack((edges[:-1], edges[1:]), dim=1) + torch.arange(len(lengths))[:, None] + 2
    inside = [at for start, stop in spans.tolist() for at in range(start, stop)]
    chosen = choose(inside)
    count = int(spans[-1, 1]) + 1
    rows = sorted({*chosen, 0, count - 1})
    generator = torch.Generator().manual_seed(count)
    layer = [torch.randn(h, count, d, generator=generator).to(dtype) for h, d in shapes]
    fresh = [torch.randn(h, len(rows), d, generator=generator).to(dtype) for h, d in shapes]
    tables = {
        "selected": torch.tensor(chosen),
        "fresh_rows": torch.tensor([rows.index(at) for at in chosen]),
        "spans": spans,
        "weights": torch.linspace(0.02, 0.1, len(lengths)),
    }
    want = _formula(TransferPlan(**tables), fresh, layer, _inv_freq(rotary), interleaved)
    untouched = [at for at in range(count) if at not in inside]
    got = [part.to(device, copy=True) for part in layer]
    plan = TransferPlan(**{name: table.to(device) for name, table in tables.items()})
    table = rotation_table(torch.arange(count), _inv_freq(rotary), interleaved).to(device)
    fresh_there = [part.to(device) for part in fresh]
    added = deviation_vectors(plan, table, (fresh_there[0], fresh_there[1]), (got[0], got[1]))
    totals = [torch.full_like(vectors, 0.5) for vectors in added]
    transfer_deviation(plan, table, *fresh_there, *got, (totals[0], totals[1]))
    for total, vectors in zip(totals, added, strict=True):
        torch.testing.assert_close(total, 0.5 + vectors, atol=1e-4, rtol=1e-4)
    for part, expected, before in zip(got, want, layer, strict=True):
        assert_near(part, expected, dtype)
        assert torch.equal(part.cpu()[:, untouched], before[:, untouched])


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    data=st.data(),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 32), (2, 65, 6)]),
    dtype=st.sampled_from(DTYPES),
    values=st.sampled_from([None, (1, 128), (4, 24)]),
    interleaved=st.booleans(),
)
def test_equals_the_formula(
    lengths: list[int],
    data: st.DataObject,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    values: tuple[int, int] | None,
    interleaved: bool,
) -> None:
    def choose(inside: list[int]) -> list[int]:
        return sorted(data.draw(st.sets(st.sampled_from(inside), min_size=1)))

    _compare(lengths, choose, shape, dtype, torch.device("cpu"), values, interleaved)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "step", "shape", "values", "interleaved"),
    [
        ([40, 7, 33], 3, (2, 64, 64), None, False),
        ([5], 1, (1, 80, 80), None, True),
        ([1, 20, 1], 8, (3, 96, 32), None, False),
        ([18, 18], 17, (1, 256, 256), None, False),
        ([9, 20], 4, (3, 96, 32), (1, 128), True),
        ([20], 3, (1, 64, 64), (2, 24), False),
    ],
    ids=["three_chunks", "all_selected", "partial_rotary", "dim_256", "wide_values", "more_values"],
)
def test_triton_equals_the_formula(
    lengths: list[int],
    step: int,
    shape: tuple[int, int, int],
    values: tuple[int, int] | None,
    interleaved: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    _compare(lengths, lambda inside: inside[::step], shape, dtype, device, values, interleaved)
