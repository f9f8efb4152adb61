"""Placing chunks against rotating and copying one token after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_kernels import ChunkStack, place_chunks, rotation_tables
from fused_kv_kernels.reference import rerotate_keys_reference

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def _inv_freq(rotary: int) -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    gaps=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    deltas=st.lists(st.integers(-4000, 4000), min_size=5, max_size=5),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 80), (2, 96, 40)]),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_equals_reference(
    lengths: list[int], gaps: list[int], deltas: list[int], shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    heads, dim, rotary = shape
    generator = torch.Generator().manual_seed(sum(lengths))
    whole = [torch.randn(2, heads, n + 3, dim, generator=generator).to(dtype) for n in lengths]
    chunks = [(kv[0, :, 2 : 2 + n], kv[1, :, 2 : 2 + n]) for kv, n in zip(whole, lengths, strict=True)]
    starts, at = [], 0
    for gap, n in zip(gaps, lengths, strict=False):
        starts.append(at + gap)
        at += gap + n
    deltas = deltas[: len(lengths)]
    layer = torch.full((2, heads, at + 2, dim), 7.0, dtype=dtype)
    want = layer.clone()
    for (keys, values), start, delta in zip(chunks, starts, deltas, strict=True):
        moves = torch.full((keys.shape[1],), delta)
        want[0, :, start : start + keys.shape[1]] = rerotate_keys_reference(keys, moves, _inv_freq(rotary))
        want[1, :, start : start + keys.shape[1]] = values
    place_chunks(chunks, starts, *rotation_tables(torch.tensor(deltas), _inv_freq(rotary)), layer[0], layer[1])
    assert torch.equal(layer[1], want[1])
    torch.testing.assert_close(layer[0].float(), want[0].float(), atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize(("stored", "computed"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_chunks_in_another_dtype_than_the_layer(stored: torch.dtype, computed: torch.dtype) -> None:
    """Native operators take one dtype: a stack of another must not be read as if it had the layer's."""
    keys, values = torch.randn(2, 2, 3, 11, 64).to(stored)
    tables = rotation_tables(torch.tensor([7]), _inv_freq(64))
    layer = torch.zeros(2, 3, 20, 64, dtype=computed)
    ChunkStack([(keys, values)], [5], *tables).place(1, *layer)
    want = rerotate_keys_reference(keys[1].float(), torch.full((11,), 7), _inv_freq(64))
    torch.testing.assert_close(layer[0, :, 5:16].float(), want, atol=4e-2, rtol=1e-2)
    assert torch.equal(layer[1, :, 5:16], values[1].to(computed))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_chunk_that_does_not_move_keeps_every_bit(dtype: torch.dtype) -> None:
    keys, values = torch.randn(2, 3, 11, 64).to(dtype)
    layer = torch.zeros(2, 3, 20, 64, dtype=dtype)
    place_chunks([(keys, values)], [5], *rotation_tables(torch.zeros(1, dtype=torch.int64), _inv_freq(64)), *layer)
    assert torch.equal(layer[0, :, 5:16], keys)
    assert torch.equal(layer[1, :, 5:16], values)
    assert not layer[:, :, :5].any()
    assert not layer[:, :, 16:].any()


def test_no_chunks_change_nothing() -> None:
    layer = torch.ones(2, 1, 4, 8)
    place_chunks([], [], torch.empty(0, 4), torch.empty(0, 4), layer[0], layer[1])
    assert torch.equal(layer, torch.ones(2, 1, 4, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [slice(None), slice(2, 7)])
def test_a_stack_places_every_layer_as_single_layers_are(dtype: torch.dtype, cut: slice) -> None:
    generator = torch.Generator().manual_seed(1)
    chunks = []
    for tokens in (9, 12):
        keys, values = torch.randn(2, 3, 2, tokens, 16, generator=generator).to(dtype)
        chunks.append((keys[..., cut, :], values[..., cut, :]))
    starts, tables = [1, 15], rotation_tables(torch.tensor([5, -300]), _inv_freq(16))
    stack = ChunkStack(chunks, starts, *tables)
    for layer in (2, 0, 1):
        got, want = torch.zeros(2, 2, 2, 30, 16, dtype=dtype)
        stack.place(layer, got[0], got[1])
        place_chunks([(keys[layer], values[layer]) for keys, values in chunks], starts, *tables, want[0], want[1])
        assert torch.equal(got, want)
        assert bool(got.any())


def test_an_empty_stack_places_nothing() -> None:
    layer = torch.ones(2, 1, 4, 8)
    ChunkStack([], [], torch.empty(0, 4), torch.empty(0, 4)).place(0, layer[0], layer[1])
    assert torch.equal(layer, torch.ones(2, 1, 4, 8))
