"""Placing chunks in Triton and in torch against the reference: layouts, partial rotary, int8."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import TOLERANCE, assert_near

from fused_kv_kernels import UnsupportedOperandsError, place_chunks, rotation_table
from fused_kv_kernels.reference import place_chunks_reference


def _inv_freq(rotary: int) -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))


def _chunks(
    tokens: list[int], heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(sum(tokens))
    drawn = [torch.randn(2, heads, n, dim, generator=generator) for n in tokens]
    return [((30 * x).to(device, dtype)[0], (30 * x).to(device, dtype)[1]) for x in drawn]


def _compare(tokens: list[int], dim: int, rotary: int, interleaved: bool, dtype: torch.dtype, out: torch.dtype,
             device: torch.device) -> None:  # fmt: skip
    chunks = _chunks(tokens, 2, dim, dtype, device)
    scales = None
    if dtype == torch.int8:
        shapes = [((2, 1, dim), (2, n, 1)) for n in tokens]
        scales = [tuple((torch.rand(s) / 30).half().to(device) for s in both) for both in shapes]
    starts = [sum(tokens[:i]) + 3 * i for i in range(len(tokens))]
    deltas = [(-1) ** i * 777 * (i + 1) for i in range(len(tokens))]
    table = rotation_table(torch.tensor(deltas), _inv_freq(rotary), interleaved).to(device)
    got = torch.full((2, 2, sum(tokens) + 20, dim), 7.0, dtype=out, device=device)
    want = got.float().clone()
    place_chunks(chunks, starts, table, *got, scales)
    place_chunks_reference(chunks, starts, deltas, _inv_freq(rotary).to(device), *want, scales, interleaved)
    # Rotating adds up terms as large as the chunks' 100.
    assert_near(got.float() / 100, want / 100, out)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.int8], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 80), (96, 32)], ids=["full", "dim_80", "partial"])
def test_equals_reference(dim: int, rotary: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    out = torch.bfloat16 if dtype == torch.int8 else dtype
    _compare([5, 40, 1], dim, rotary, interleaved, dtype, out, device)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 70), min_size=1, max_size=4), dim=st.sampled_from([16, 48]), data=st.data())
def test_any_chunks(tokens: list[int], dim: int, data: st.DataObject, device: torch.device) -> None:
    rotary = data.draw(st.sampled_from([dim, dim // 2]))
    _compare(tokens, dim, rotary, data.draw(st.booleans()), torch.float32, torch.float32, device)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
def test_int8_in_plain_torch(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    _compare([5, 40, 1], 96, 32, interleaved, torch.int8, torch.float32, torch.device("cpu"))


def test_slices_of_chunks(device: torch.device) -> None:
    """The engine places parts of chunks: heads lie further apart than a part's tokens take."""
    ((keys, values),) = _chunks([40], 2, 64, torch.float32, device)
    table = rotation_table(torch.tensor([0]), _inv_freq(64)).to(device)
    layer = torch.zeros(2, 2, 30, 64, device=device)
    place_chunks([(keys[:, 7:20], values[:, 7:20])], [4], table, *layer)
    assert torch.equal(layer[0, :, 4:17], keys[:, 7:20])
    assert torch.equal(layer[1, :, 4:17], values[:, 7:20])
    assert not layer[:, :, 17:].any()


def test_refuses_chunks_that_do_not_fit_together(device: torch.device) -> None:
    chunks = _chunks([4], 1, 16, torch.int8, device)
    table = rotation_table(torch.tensor([0]), _inv_freq(16)).to(device)
    layer = torch.zeros(2, 1, 10, 16, device=device)
    with pytest.raises(UnsupportedOperandsError, match="scales for int8"):
        place_chunks(chunks, [0], table, *layer)
