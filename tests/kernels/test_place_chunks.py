"""Placing chunks against rotating and copying one token after another."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import PLACED, assert_near

from fused_kv_kernels import ChunkStack, RotationTable, place_chunks, rotation_table, why_not_native
from fused_kv_kernels.reference import place_chunks_reference, rerotate_keys_reference


def _inv_freq(rotary: int) -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    gaps=st.lists(st.integers(0, 9), min_size=5, max_size=5),
    deltas=st.lists(st.integers(-4000, 4000), min_size=5, max_size=5),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 80), (2, 96, 40), (2, 64, 6)]),
    values=st.sampled_from([None, (1, 128), (4, 24)]),
    interleaved=st.booleans(),
    dtype=st.sampled_from(list(PLACED)),
)
def test_equals_reference(
    lengths: list[int],
    gaps: list[int],
    deltas: list[int],
    shape: tuple[int, int, int],
    values: tuple[int, int] | None,
    interleaved: bool,
    dtype: torch.dtype,
) -> None:
    """Also with values of other heads and another width than the keys."""
    heads, dim, rotary = shape
    generator = torch.Generator().manual_seed(sum(lengths))
    shapes = (heads, dim), values or (heads, dim)
    whole = [[torch.randn(h, n + 3, d, generator=generator).to(dtype) for h, d in shapes] for n in lengths]
    chunks = [(keys[:, 2 : 2 + n], others[:, 2 : 2 + n]) for (keys, others), n in zip(whole, lengths, strict=True)]
    starts, at = [], 0
    for gap, n in zip(gaps, lengths, strict=False):
        starts.append(at + gap)
        at += gap + n
    deltas = deltas[: len(lengths)]
    layer = [torch.full((h, at + 2, d), 7.0, dtype=dtype) for h, d in shapes]
    want = [part.clone() for part in layer]
    place_chunks_reference(chunks, starts, deltas, _inv_freq(rotary), *want, interleaved=interleaved)
    table = rotation_table(torch.tensor(deltas), _inv_freq(rotary), interleaved)
    stacked = [part.clone() for part in layer]
    place_chunks(chunks, starts, table, *layer)
    assert torch.equal(layer[1], want[1])
    assert_near(layer[0], want[0], dtype, PLACED)
    ChunkStack([(keys[None], others[None]) for keys, others in chunks], starts, [table]).place(0, *stacked)
    assert all(map(torch.equal, stacked, layer))


@pytest.mark.parametrize(("stored", "computed"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_chunks_in_another_dtype_than_the_layer(stored: torch.dtype, computed: torch.dtype) -> None:
    """Native operators take one dtype: a stack of another must not be read as if it had the layer's."""
    keys, values = torch.randn(2, 2, 3, 11, 64).to(stored)
    table = rotation_table(torch.tensor([7]), _inv_freq(64))
    layer = torch.zeros(2, 3, 20, 64, dtype=computed)
    ChunkStack([(keys, values)], [5], [table] * 2).place(1, *layer)
    want = rerotate_keys_reference(keys[1].float(), torch.full((11,), 7), _inv_freq(64))
    assert_near(layer[0, :, 5:16], want, torch.bfloat16, PLACED)
    assert torch.equal(layer[1, :, 5:16], values[1].to(computed))


@pytest.mark.parametrize("dtype", PLACED, ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["half_split", "interleaved"])
@pytest.mark.parametrize(("delta", "inv_freq"), [(0, _inv_freq(64)), (900, torch.zeros(32))], ids=["unmoved", "still"])
def test_a_chunk_that_does_not_turn_keeps_every_bit(
    delta: int, inv_freq: torch.Tensor, interleaved: bool, dtype: torch.dtype
) -> None:
    keys, values = torch.randn(2, 3, 11, 64).to(dtype)
    layer = torch.zeros(2, 3, 20, 64, dtype=dtype)
    place_chunks([(keys, values)], [5], rotation_table(torch.tensor([delta]), inv_freq, interleaved), *layer)
    assert torch.equal(layer[0, :, 5:16], keys)
    assert torch.equal(layer[1, :, 5:16], values)
    assert not layer[:, :, :5].any()
    assert not layer[:, :, 16:].any()


def test_no_chunks_change_nothing() -> None:
    layer = torch.ones(2, 1, 4, 8)
    place_chunks([], [], RotationTable(torch.empty(0, 4), torch.empty(0, 4)), layer[0], layer[1])
    assert torch.equal(layer, torch.ones(2, 1, 4, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", [slice(None), slice(2, 7)])
def test_a_stack_places_every_layer_as_single_layers_are(dtype: torch.dtype, cut: slice) -> None:
    generator = torch.Generator().manual_seed(1)
    chunks = []
    for tokens in (9, 12):
        keys, values = torch.randn(2, 3, 2, tokens, 16, generator=generator).to(dtype)
        chunks.append((keys[..., cut, :], values[..., cut, :]))
    starts, tables = (
        [1, 15],
        [rotation_table(torch.tensor(moves), _inv_freq(16)) for moves in ([5, -300], [0, 7], [9, 9])],
    )
    stack = ChunkStack(chunks, starts, tables)
    for layer in (2, 0, 1):
        got, want = torch.zeros(2, 2, 2, 30, 16, dtype=dtype)
        stack.place(layer, got[0], got[1])
        place_chunks([(keys[layer], values[layer]) for keys, values in chunks], starts, tables[layer], want[0], want[1])
        assert torch.equal(got, want)
        assert bool(got.any())


def test_an_empty_stack_places_nothing() -> None:
    layer = torch.ones(2, 1, 4, 8)
    ChunkStack([], [], []).place(0, layer[0], layer[1])
    assert torch.equal(layer, torch.ones(2, 1, 4, 8))


def _int8(
    tokens: int, heads: int, dim: int, seed: int, layers: int = 1
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Return keys and values ``[layers, heads, tokens, dim]`` in eight bits, and their scales."""
    generator = torch.Generator().manual_seed(seed)
    kv = torch.randint(-127, 128, (2, layers, heads, tokens, dim), generator=generator, dtype=torch.int8)
    shapes = (layers, heads, 1, dim), (layers, heads, tokens, 1)
    return tuple(kv), tuple((torch.rand(shape, generator=generator) / 30).half() for shape in shapes)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    delta=st.integers(-4000, 4000),
    shape=st.sampled_from([(1, 16, 16), (3, 64, 64), (2, 80, 80), (2, 96, 40), (2, 34, 10)]),
    values=st.sampled_from([None, (1, 128), (4, 24)]),
    cut=st.integers(0, 3),
    interleaved=st.booleans(),
)
def test_eight_bits_equal_the_reference(
    kernels: str,
    lengths: list[int],
    delta: int,
    shape: tuple[int, int, int],
    values: tuple[int, int] | None,
    cut: int,
    interleaved: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Scaled, moved, and rounded once: within half a unit in the last place of bfloat16."""
    monkeypatch.setenv("FUSED_KV_KERNELS", kernels)
    heads, dim, rotary = shape
    chunks, scales = [], []
    shapes = (heads, dim), values or (heads, dim)
    for seed, tokens in enumerate(lengths):
        (keys, _), (of_keys, _) = _int8(tokens + cut, *shapes[0], seed)
        (_, others), (_, of_others) = _int8(tokens + cut, *shapes[1], seed)
        chunks.append((keys[0, :, cut:], others[0, :, cut:]))
        scales.append((of_keys[0], of_others[0, :, cut:]))
    starts = [sum(lengths[:i]) + 2 * i + 1 for i in range(len(lengths))]
    deltas = [delta * (i + 1) for i in range(len(lengths))]
    got = [torch.full((h, sum(lengths) + 12, d), 7.0, dtype=torch.bfloat16) for h, d in shapes]
    want = [part.float() for part in got]
    place_chunks(chunks, starts, rotation_table(torch.tensor(deltas), _inv_freq(rotary), interleaved), *got, scales)
    place_chunks_reference(chunks, starts, deltas, _inv_freq(rotary), *want, scales, interleaved)
    # Two terms that nearly cancel leave their own error, and values of up to 127 / 30 are scaled without any.
    torch.testing.assert_close(got[0].float(), want[0], atol=4e-6, rtol=2**-8)
    assert torch.equal(got[1], want[1].bfloat16())


def test_a_stack_in_eight_bits_places_every_layer_as_single_layers_are() -> None:
    parts = [_int8(tokens, 2, 16, tokens, layers=3) for tokens in (9, 12)]
    cut = slice(2, 7)
    chunks = [(kv[0][..., cut, :], kv[1][..., cut, :]) for kv, _ in parts]
    scales = [(key_scale, value_scale[..., cut, :]) for _, (key_scale, value_scale) in parts]
    starts, tables = (
        [1, 15],
        [rotation_table(torch.tensor(moves), _inv_freq(16)) for moves in ([5, -300], [0, 7], [9, 9])],
    )
    stack = ChunkStack(chunks, starts, tables, scales=scales)
    assert (stack._entries is None) == all(why_not_native(dtype) for dtype in (torch.bfloat16, torch.float32))
    for layer in (2, 0, 1):
        got, want = torch.zeros(2, 2, 2, 30, 16, dtype=torch.bfloat16)
        stack.place(layer, *got)
        one, factors = ([(a[layer], b[layer]) for a, b in pairs] for pairs in (chunks, scales))
        place_chunks(one, starts, tables[layer], *want, factors)
        assert torch.equal(got, want)
        assert bool(got.any())


@pytest.mark.parametrize("before", [False, True], ids=["first", "later"])
@pytest.mark.parametrize("wrong", ["before the first", "after the last", "other values"])
def test_a_stack_writes_and_reads_nothing_beside_its_layers(wrong: str, before: bool) -> None:
    """What native code would believe: a layer that is none, values that are smaller than the keys."""
    table = rotation_table(torch.tensor([3]), _inv_freq(64))
    stack = ChunkStack([tuple(torch.randn(2, 3, 1, 6, 64))], [4], [table] * 3)
    layer = torch.zeros(2, 1, 12, 64)
    if before:
        stack.place(0, *layer)
    number = {"before the first": -1, "after the last": 3, "other values": 1}[wrong]
    values = torch.zeros(1, 5, 64) if wrong == "other values" else layer[1]
    with pytest.raises((ValueError, IndexError)):
        stack.place(number, layer[0], values)


@pytest.mark.parametrize("wrong", ["missing", "keys", "values", "layers"])
def test_scales_that_do_not_fit_are_refused(wrong: str) -> None:
    kv, scales = _int8(6, 2, 16, 0, layers=2)
    tables = [rotation_table(torch.tensor([3]), _inv_freq(16))] * 2
    pairs, error = {
        "missing": ([], "0 pairs of scales and 1 chunks"),
        "keys": ([(scales[0][..., :8], scales[1])], "are not those of a chunk"),
        "values": ([(scales[0], scales[1][:, :, :4])], "are not those of a chunk"),
        "layers": ([(scales[0][:1], scales[1][:1])], r"layers needs a rotation table for each"),
    }[wrong]
    layer = torch.zeros(2, 2, 30, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=error):
        ChunkStack([kv], [2], tables, scales=pairs).place(1, *layer)
