"""Chunk views: attention over shared chunks is that over a private cache into which everything was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import assert_near
from torch import Tensor

from fused_kv_kernels import (
    ChunkShift,
    ChunkView,
    DecodeViews,
    LayerRotations,
    SequenceView,
    SharedChunk,
    ShiftStack,
    TransferPlan,
    decode_views,
    deviation_vectors,
    place_chunks,
    rotation_table,
    transfer_deviation,
    why_not_native,
)
from fused_kv_kernels.native import views
from fused_kv_kernels.reference import row_attention_reference
from fused_kv_kernels.reference_views import view_attention_reference
from fused_kv_kernels.scoring import Scoring

DTYPES = (torch.float32, torch.bfloat16)
LAYERS = 2
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Model:
    """Heads of queries and keys, widths of keys and values, and how layers rotate: each by frequencies of its own."""

    heads: tuple[int, int] = (6, 2)
    dims: tuple[int, int] = (64, 64)
    rotary: int = 64
    interleaved: bool = False
    dtype: torch.dtype = torch.float32

    def rotations(self) -> LayerRotations:
        powers = torch.arange(0, self.rotary, 2, dtype=torch.float32) / self.rotary
        return LayerRotations([base**-powers for base in (10_000.0, 500.0)], self.interleaved)

    def kv(self, *shape: int) -> Pair:
        """Keys and values ``[L, Hkv, ..., D]``."""
        keys, values = (torch.randn(LAYERS, self.heads[1], *shape, dim).to(self.dtype) for dim in self.dims)
        return keys, values


def make_chunk(model: Model, tokens: int, shifted: bool = True) -> SharedChunk:
    keys, values = model.kv(tokens)
    shifts = [
        (torch.randint(-127, 128, part.shape, dtype=torch.int8), torch.rand(*part.shape[:3], 1) / 300)
        for part in (keys, values)
    ]
    return SharedChunk(keys, values, (shifts[0], shifts[1]) if shifted else None)


@dataclass
class Request:
    """A request over some chunks: its view, and the private cache ``[L, Hkv, N, D]`` that it would have instead."""

    view: SequenceView
    own_row: int
    private: Pair
    position: int


def make_request(
    model: Model, rotations: LayerRotations, chunks: Sequence[SharedChunk], gap: int, share: float
) -> Request:
    """Place chunks with fresh text between them, shift them, transfer, and write what is fresh."""
    starts, at = [], gap
    for chunk in chunks:
        starts.append(at)
        at += chunk.num_tokens + gap
    length = at + 3
    deltas = [start - 11 * number for number, start in enumerate(starts)]
    spans = torch.tensor([[start, start + one.num_tokens] for start, one in zip(starts, chunks, strict=True)])
    in_chunks = torch.cat([torch.arange(int(a), int(b)) for a, b in spans.view(-1, 2)] or [torch.empty(0)]).long()
    selected = in_chunks[torch.rand(in_chunks.shape[0]) < share]
    shown = torch.zeros(length, dtype=torch.bool)
    shown[in_chunks] = True
    shown[selected] = False
    fresh_at = (~shown).nonzero().flatten()
    fresh = model.kv(fresh_at.shape[0])
    plan = TransferPlan(
        selected, torch.searchsorted(fresh_at, selected), spans.view(-1, 2), torch.full((len(chunks),), 0.05)
    )
    private = tuple(torch.zeros(LAYERS, part.shape[1], length, part.shape[3], dtype=model.dtype) for part in fresh)
    shifts = [
        ChunkShift(start, slice(0, one.num_tokens), 0.3, *one.shifts)
        for one, start in zip(chunks, starts, strict=True)
        if one.shifts is not None
    ]
    # A view has weights for each layer, of keys and of values.
    shift_weights = torch.rand(LAYERS, 2, len(shifts)) - 0.2
    vectors = []
    for layer in range(LAYERS):
        of_layer = [part[layer] for part in private]
        table = rotation_table(torch.tensor(deltas), rotations.kinds[layer], model.interleaved)
        place_chunks([(one.keys[layer], one.values[layer]) for one in chunks], starts, table, *of_layer)
        moved = [delta for one, delta in zip(chunks, deltas, strict=True) if one.shifts is not None]
        by = rotation_table(torch.tensor(moved), rotations.kinds[layer], model.interleaved)
        stack = ShiftStack(shifts, [by] * LAYERS)
        stack.weights = shift_weights[layer]
        stack.add(layer, *of_layer)
        whole = rotation_table(torch.arange(length), rotations.kinds[layer], model.interleaved)
        rows = fresh[0][layer], fresh[1][layer]
        vectors.append(deviation_vectors(plan, whole, rows, (of_layer[0], of_layer[1])))
        transfer_deviation(plan, whole, *rows, *of_layer)
        for part, new in zip(of_layer, rows, strict=True):
            part[:, fresh_at] = new
    seen, number = [], 0
    for index, (one, start) in enumerate(zip(chunks, starts, strict=True)):
        weights = None
        if one.shifts is not None:
            weights, number = shift_weights[:, :, number], number + 1
        added = tuple(torch.stack([pair[part][:, index] for pair in vectors]).contiguous() for part in (0, 1))
        mine = selected[(selected >= start) & (selected < start + one.num_tokens)] - start
        weights = None if weights is None else weights.contiguous()
        seen.append(ChunkView(one, start, deltas[index], weights, (added[0], added[1]), mine))
    order = torch.randperm(fresh_at.shape[0] - 1)
    order = torch.cat((order, torch.tensor([fresh_at.shape[0] - 1])))
    own = [torch.cat((part[:, :, order], torch.full_like(part[:, :, :5], torch.nan)), dim=2)[:, None] for part in fresh]
    return Request(
        SequenceView(seen, own[0], own[1], rotations), fresh_at.shape[0] - 1, (private[0], private[1]), length - 1
    )


def want_of(request: Request, q: Tensor, layer: int, scoring: Scoring) -> Tensor:
    """Attention ``[Hq, Dv]`` of one row over the private cache."""
    keys, values = (part[layer][None].float() for part in request.private)
    at, options = torch.tensor([request.position]), {"softcap": scoring.softcap, "sinks": scoring.sinks}
    return row_attention_reference(q[None, :, None].float(), keys, values, at, scoring.scale, **options)[0, :, 0]


def step(requests: Sequence[Request], q: Tensor, layer: int, scoring: Scoring) -> Tensor:
    """Attend one row of each request; its key and value are taken out of the cache and written anew."""
    k, v = (
        torch.stack([getattr(one.view, name)[layer, 0, :, one.own_row] for one in requests], dim=1)[None]
        for name in ("keys", "values")
    )
    for one in requests:
        one.view.keys[layer, 0, :, one.own_row] = torch.nan
        one.view.values[layer, 0, :, one.own_row] = torch.nan
    batch = DecodeViews([one.view for one in requests], [one.own_row for one in requests])
    return decode_views(q, k, v, batch, layer, scoring.scale, softcap=scoring.softcap, sinks=scoring.sinks)


def queries(model: Model, rows: int) -> Tensor:
    return torch.randn(1, rows, model.heads[0], model.dims[0]).to(model.dtype).transpose(1, 2)


MODELS = st.builds(
    Model,
    heads=st.sampled_from([(2, 2), (6, 2), (9, 3), (7, 1)]),
    dims=st.sampled_from([(64, 64), (80, 48), (32, 128)]),
    rotary=st.sampled_from([32, 16, 6]),
    interleaved=st.booleans(),
)


@settings(max_examples=60)
@given(
    model=MODELS,
    lengths=st.lists(st.integers(1, 300), max_size=4),
    gap=st.integers(0, 3),
    share=st.sampled_from([0.0, 0.15, 0.6, 1.0]),
    softcap=st.sampled_from([None, 20.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_view_is_the_private_cache(
    model: Model, lengths: list[int], gap: int, share: float, softcap: float | None, sinks: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    rotations = model.rotations()
    chunks = [make_chunk(model, length, shifted=number % 3 < 2) for number, length in enumerate(lengths)]
    request = make_request(model, rotations, chunks, gap, share)
    of_heads = torch.linspace(-2.0, 4.0, model.heads[0]) if sinks else None
    scoring = Scoring(model.dims[0] ** -0.5, softcap, of_heads)
    q = queries(model, 1)[0, :, 0]
    for layer in range(LAYERS):
        want = want_of(request, q, layer, scoring)
        got = view_attention_reference(q, request.view, request.own_row + 1, layer, scoring)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            step([request], q[None, :, None], layer, scoring)[0, :, 0], want, atol=1e-4, rtol=1e-4
        )


def shared_batch(model: Model, count: int = 4) -> list[Request]:
    """Requests over five chunks, of which each sees some, in an order of its own."""
    rotations = model.rotations()
    chunks = [make_chunk(model, length, shifted=length != 40) for length in (256, 40, 300, 7, 130)]
    picks = [[0, 1, 2, 3, 4], [4, 2, 0], [1], [], [2, 4], [3, 0]]
    return [make_request(model, rotations, [chunks[i] for i in picks[row % 6]], row % 3, 0.2) for row in range(count)]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3), (7, 1)], ids=str)
def test_a_batch_is_its_private_caches(
    heads: tuple[int, int], dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_KV_KERNELS", kernels)
    torch.manual_seed(0)
    model = Model(heads, (64, 48), 32, dtype=dtype)
    requests, q = shared_batch(model, 6), queries(model, 6)
    for layer, scoring in ((0, Scoring(0.125)), (1, Scoring(0.125, 9.0, torch.linspace(-1.0, 3.0, heads[0])))):
        want = torch.stack([want_of(one, q[0, :, row], layer, scoring) for row, one in enumerate(requests)], dim=1)
        got = step(requests, q, layer, scoring)
        assert got.dtype == dtype
        assert got.transpose(1, 2).is_contiguous()
        assert_near(got[0], want, dtype)


@pytest.fixture
def threads() -> Iterator[None]:
    """Leave torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_is_the_same_whatever_its_company(dtype: torch.dtype) -> None:
    """Bit by bit, with any number of threads, also beside rows that see the same chunks."""
    if why_not_native(dtype) is not None:
        pytest.skip(f"no native operators: {why_not_native(dtype)}")
    torch.manual_seed(1)
    model = Model((9, 3), dtype=dtype)
    requests, q = shared_batch(model, 6), queries(model, 6)
    together = step(requests, q, 1, Scoring(0.125))
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        for rows in ([0], [1, 0], [5, 4, 3, 2, 1, 0], [3], [2, 5]):
            part = q.transpose(1, 2)[:, rows].transpose(1, 2)
            assert torch.equal(step([requests[row] for row in rows], part, 1, Scoring(0.125)), together[:, :, rows])


@pytest.mark.skipif(why_not_native(torch.float32) is not None, reason="no native operators of float32")
def test_processors_without_avx512_equal_the_private_caches(
    float32_without_avx512: CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "loaded_library", lambda _: float32_without_avx512)
    for model in (Model((9, 3)), Model((5, 1), (36, 20), 12, interleaved=True)):
        torch.manual_seed(2)
        requests, q, scoring = shared_batch(model), queries(model, 4), Scoring(0.125)
        want = torch.stack([want_of(one, q[0, :, row], 0, scoring) for row, one in enumerate(requests)], dim=1)
        assert_near(step(requests, q, 0, scoring)[0], want, torch.float32)


def test_shared_chunks_stay_as_they_are_and_are_no_ones_own() -> None:
    torch.manual_seed(3)
    model = Model()
    rotations, chunk = model.rotations(), make_chunk(model, 200)
    before = chunk.keys.clone(), chunk.values.clone()
    requests = [make_request(model, rotations, [chunk], 2, 0.15) for _ in range(3)]
    step(requests, queries(model, 3), 0, Scoring(0.125))
    assert torch.equal(chunk.keys, before[0])
    assert torch.equal(chunk.values, before[1])
    private = sum(part.nbytes for part in requests[0].private)
    assert requests[0].view.own_nbytes < 0.4 * private


def test_what_does_not_fit_is_refused() -> None:
    model = Model()
    rotations, chunk = model.rotations(), make_chunk(model, 10)
    plain = SharedChunk(chunk.keys, chunk.values)
    weights, vectors = torch.zeros(LAYERS, 2), (torch.zeros(LAYERS, 2, 64), torch.zeros(LAYERS, 2, 64))
    own: dict[str, Any] = {name: torch.zeros(LAYERS, 1, 2, 5, 64) for name in ("keys", "values")}
    with pytest.raises(ValueError, match="do not fit together"):
        SharedChunk(chunk.keys, chunk.values[:, :, :9])
    with pytest.raises(ValueError, match="without a shift"):
        ChunkView(plain, 0, 0, weights)
    for wrong in (weights[:1], weights.double()):
        with pytest.raises(ValueError, match="do not fit a chunk"):
            ChunkView(chunk, 0, 0, wrong)
    with pytest.raises(ValueError, match="do not fit a chunk"):
        ChunkView(chunk, 0, 0, weights, (vectors[0], vectors[1][:, :1]))
    for hidden in ([3, 3], [4, 2], [-1], [10]):
        with pytest.raises(ValueError, match="must ascend and lie among"):
            ChunkView(chunk, 0, 0, hidden=torch.tensor(hidden))
    with pytest.raises(ValueError, match="does not fit a cache"):
        SequenceView([ChunkView(chunk, 0, 0)], own["keys"].bfloat16(), own["values"].bfloat16(), rotations)
    with pytest.raises(ValueError, match="same number of dimensions"):
        LayerRotations([torch.zeros(4), torch.zeros(8)])
    one, other, alike = (SequenceView([], **{n: x.clone() for n, x in own.items()}, rotations=r)
                         for r in (rotations, Model(rotary=32).rotations(), model.rotations()))  # fmt: skip
    with pytest.raises(ValueError, match="have the same rotations"):
        DecodeViews([one, other], [0, 0])
    DecodeViews([one, alike], [0, 0])
    with pytest.raises(ValueError, match="position 5 lies outside"):
        DecodeViews([one], [5])
