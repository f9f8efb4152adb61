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
    return 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / max(rotary, 1)))


_Shapes = tuple[tuple[int, int], tuple[int, int]]


def _chunks(
    tokens: list[int], shapes: _Shapes, dtype: torch.dtype, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return keys and values, ``[heads, tokens, width]`` by the heads and width of either."""
    generator = torch.Generator().manual_seed(sum(tokens))
    drawn = [[torch.randn(heads, n, dim, generator=generator) for heads, dim in shapes] for n in tokens]
    return [((30 * keys).to(device, dtype), (30 * values).to(device, dtype)) for keys, values in drawn]


def _compare(
    tokens: list[int],
    shapes: _Shapes,
    rotary: int,
    interleaved: bool,
    dtype: torch.dtype,
    out: torch.dtype,
    device: torch.device,
) -> None:
    chunks, scales = _chunks(tokens, shapes, dtype, device), None
    if dtype == torch.int8:
        (key_heads, dim), (value_heads, _) = shapes
        factors = [((key_heads, 1, dim), (value_heads, n, 1)) for n in tokens]
        scales = [tuple((torch.rand(s) / 30).half().to(device) for s in both) for both in factors]
    starts = [sum(tokens[:i]) + 3 * i for i in range(len(tokens))]
    deltas = [(-1) ** i * 777 * (i + 1) for i in range(len(tokens))]
    table = rotation_table(torch.tensor(deltas), _inv_freq(rotary), interleaved).to(device)
    got = [torch.full((heads, sum(tokens) + 20, dim), 7.0, dtype=out, device=device) for heads, dim in shapes]
    want = [part.float() for part in got]
    place_chunks(chunks, starts, table, *got, scales)
    place_chunks_reference(chunks, starts, deltas, _inv_freq(rotary).to(device), *want, scales, interleaved)
    # Rotating adds up terms as large as the chunks' 100.
    for part, expected in zip(got, want, strict=True):
        assert_near(part.float() / 100, expected / 100, out)


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.int8], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (80, 80), (96, 32)], ids=["full", "dim_80", "partial"])
def test_equals_reference(dim: int, rotary: int, interleaved: bool, dtype: torch.dtype, device: torch.device) -> None:
    out = torch.bfloat16 if dtype == torch.int8 else dtype
    _compare([5, 40, 1], ((2, dim), (2, dim)), rotary, interleaved, dtype, out, device)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 70), min_size=1, max_size=4), dim=st.sampled_from([16, 48]), data=st.data())
def test_any_chunks(tokens: list[int], dim: int, data: st.DataObject, device: torch.device) -> None:
    rotary = data.draw(st.sampled_from([dim, dim // 2]))
    values = data.draw(st.sampled_from([(2, dim), (1, 96), (3, 8)]))
    _compare(tokens, ((2, dim), values), rotary, data.draw(st.booleans()), torch.float32, torch.float32, device)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
def test_int8_in_plain_torch(interleaved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    _compare([5, 40, 1], ((2, 96), (2, 96)), 32, interleaved, torch.int8, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("values", [(1, 128), (3, 24)], ids=str)
def test_int8_with_values_of_another_shape(values: tuple[int, int], device: torch.device) -> None:
    _compare([5, 40, 1], ((2, 96), values), 0, True, torch.int8, torch.float32, device)
    _compare([5, 40, 1], ((2, 96), values), 32, True, torch.int8, torch.bfloat16, device)


def test_slices_of_chunks(device: torch.device) -> None:
    """The engine places parts of chunks: heads lie further apart than a part's tokens take."""
    ((keys, values),) = _chunks([40], ((2, 64), (2, 64)), torch.float32, device)
    table = rotation_table(torch.tensor([0]), _inv_freq(64)).to(device)
    layer = torch.zeros(2, 2, 30, 64, device=device)
    place_chunks([(keys[:, 7:20], values[:, 7:20])], [4], table, *layer)
    assert torch.equal(layer[0, :, 4:17], keys[:, 7:20])
    assert torch.equal(layer[1, :, 4:17], values[:, 7:20])
    assert not layer[:, :, 17:].any()


def test_refuses_chunks_that_do_not_fit_together(device: torch.device) -> None:
    chunks = _chunks([4], ((1, 16), (1, 16)), torch.int8, device)
    table = rotation_table(torch.tensor([0]), _inv_freq(16)).to(device)
    layer = torch.zeros(2, 1, 10, 16, device=device)
    with pytest.raises(UnsupportedOperandsError, match="scales for int8"):
        place_chunks(chunks, [0], table, *layer)
