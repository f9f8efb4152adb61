"""Deviation transfer against its formula, one token after another."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near

from fused_kv_kernels import TransferPlan, rotation_table, transfer_deviation
from fused_kv_kernels.reference import rerotate_keys_reference

DTYPES = (torch.float32, torch.bfloat16)


def _inv_freq(rotary: int) -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))


def _formula(
    plan: TransferPlan, fresh: torch.Tensor, layer: torch.Tensor, inv_freq: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    def turn(key: torch.Tensor, position: int) -> torch.Tensor:
        return rerotate_keys_reference(key[:, None], torch.tensor([position]), inv_freq)[:, 0]

    keys, values = layer.float().clone()
    fresh_of = dict(zip(plan.selected.tolist(), plan.fresh_rows.tolist(), strict=True))
    for (start, stop), weight in zip(plan.spans.tolist(), plan.weights.tolist(), strict=True):
        mine = [at for at in fresh_of if start <= at < stop]
        if not mine:
            continue
        delta_k = weight * sum(turn(fresh[0, :, fresh_of[at]].float() - layer[0, :, at].float(), -at) for at in mine)
        delta_v = weight * sum(fresh[1, :, fresh_of[at]].float() - layer[1, :, at].float() for at in mine)
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
) -> None:
    heads, dim, rotary = shape
    edges = torch.tensor([0, *lengths]).cumsum(0)
    # One position of fresh text between two chunks.
    spans = torch.stack((edges[:-1], edges[1:]), dim=1) + torch.arange(len(lengths))[:, None] + 2
    inside = [at for start, stop in spans.tolist() for at in range(start, stop)]
    chosen = choose(inside)
    count = int(spans[-1, 1]) + 1
    rows = sorted({*chosen, 0, count - 1})
    generator = torch.Generator().manual_seed(count)
    layer = torch.randn(2, heads, count, dim, generator=generator).to(dtype)
    fresh = torch.randn(2, heads, len(rows), dim, generator=generator).to(dtype)
    tables = {
        "selected": torch.tensor(chosen),
        "fresh_rows": torch.tensor([rows.index(at) for at in chosen]),
        "spans": spans,
        "weights": torch.linspace(0.02, 0.1, len(lengths)),
    }
    want = _formula(TransferPlan(**tables), fresh, layer, _inv_freq(rotary))
    untouched = [at for at in range(count) if at not in inside]
    got = layer.to(device)
    plan = TransferPlan(**{name: table.to(device) for name, table in tables.items()})
    table = rotation_table(torch.arange(count), _inv_freq(rotary)).to(device)
    transfer_deviation(plan, table, *fresh.to(device), *got)
    for part, expected in zip(got.cpu(), want, strict=True):
        assert_near(part, expected, dtype)
    assert torch.equal(got.cpu()[:, :, untouched], layer[:, :, untouched])


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    data=st.data(),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 32)]),
    dtype=st.sampled_from(DTYPES),
)
def test_equals_the_formula(
    lengths: list[int], data: st.DataObject, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    def choose(inside: list[int]) -> list[int]:
        return sorted(data.draw(st.sets(st.sampled_from(inside), min_size=1)))

    _compare(lengths, choose, shape, dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("lengths", "step", "shape"),
    [([40, 7, 33], 3, (2, 64, 64)), ([5], 1, (1, 80, 80)), ([1, 20, 1], 8, (3, 96, 32)), ([18, 18], 17, (1, 256, 256))],
    ids=["three_chunks", "all_selected", "partial_rotary", "dim_256"],
)
def test_triton_equals_the_formula(
    lengths: list[int], step: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    _compare(lengths, lambda inside: inside[::step], shape, dtype, device)
