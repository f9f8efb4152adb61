"""Decode attention against the reference, what it writes, and that a row does not depend on its company."""

from __future__ import annotations

import importlib
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

from fused_kv_kernels import DecodeCaches, decode_attention, why_not_native
from fused_kv_kernels.native import decoding
from fused_kv_kernels.reference import row_attention_reference

decode_module = importlib.import_module("fused_kv_kernels.decode_attention")
DTYPES = (torch.float32, torch.bfloat16)
LAYERS, LAYER = 3, 1
needs_native = pytest.mark.skipif(
    any(why_not_native(dtype) is not None for dtype in DTYPES), reason="no native operators of both dtypes"
)


@dataclass
class Case:
    """New tokens of sequences at some positions, their caches, and how they score."""

    q: Tensor
    k: Tensor
    v: Tensor
    caches: list[tuple[Tensor, Tensor]]
    positions: list[int]
    options: dict[str, Any]
    first_keys: Tensor | None = None

    @property
    def scale(self) -> float:
        return float(self.k.shape[3]) ** -0.5

    def only(self, rows: Sequence[int]) -> Case:
        """The same for some of the sequences, with copies of their caches."""
        picked = list(rows)
        caches = [(self.caches[row][0].clone(), self.caches[row][1].clone()) for row in picked]
        firsts = None if self.first_keys is None else self.first_keys[picked]
        q, k, v = (part.transpose(1, 2)[:, picked].transpose(1, 2) for part in (self.q, self.k, self.v))
        return Case(q, k, v, caches, [self.positions[row] for row in picked], self.options, firsts)

    def run(self) -> Tensor:
        caches = DecodeCaches(self.caches, self.positions)
        return decode_attention(
            self.q, self.k, self.v, caches, LAYER, self.scale, **self.options, first_keys=self.first_keys
        )

    def reference(self) -> Tensor:
        """What the rows give, after their keys and values were written."""
        rows = []
        for row, (cache, position) in enumerate(zip(self.caches, self.positions, strict=True)):
            seen = [part[LAYER][:, :, : position + 1].float() for part in cache]
            for part, new in zip(seen, (self.k, self.v), strict=True):
                part[:, :, position] = new[:, :, row].float()
            first = None if self.first_keys is None else self.first_keys[row : row + 1]
            at = torch.tensor([position])
            q = self.q[:, :, row : row + 1].float()
            rows.append(row_attention_reference(q, *seen, at, self.scale, **self.options, first_keys=first))
        return torch.cat(rows, dim=2)


def make_case(
    lengths: Sequence[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    window: int | None = None,
    seed: int = 0,
    **options: Any,
) -> Case:
    """Make a case: rows as projections leave them, caches with room that nobody has written to."""
    generator = torch.Generator().manual_seed(seed + len(lengths))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    rows = len(lengths)
    q, k, v = (
        drawn(1, rows, count, dim).transpose(1, 2)
        for count, dim in ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    )
    caches = []
    for number, length in enumerate(lengths):
        capacity = length + number % 4 * 17
        pair = tuple(drawn(LAYERS, 1, heads[1], capacity, dim) for dim in dims)
        for part in pair:
            part[:, :, :, length - 1 :] = float("nan")
        caches.append(pair)
    positions = [length - 1 for length in lengths]
    firsts = None if window is None else (torch.tensor(positions) - window + 1).clamp(min=0)
    return Case(q, k, v, caches, positions, options, firsts)


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=17),
    groups=st.sampled_from([1, 2, 3, 4, 5, 7, 16]),
    kv_heads=st.sampled_from([1, 3]),
    dims=st.sampled_from([(64, 64), (80, 80), (128, 128), (48, 16), (192, 128), (34, 98), (17, 5), (256, 256)]),
    window=st.sampled_from([None, None, 1, 60, 128, 10_000]),
    softcap=st.sampled_from([None, 3.0, 50.0]),
    sinks=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_decode_attention_equals_reference(
    lengths: list[int],
    groups: int,
    kv_heads: int,
    dims: tuple[int, int],
    window: int | None,
    softcap: float | None,
    sinks: bool,
    dtype: torch.dtype,
) -> None:
    heads = groups * kv_heads, kv_heads
    of_heads = torch.linspace(-4.0, 5.0, heads[0]) if sinks else None
    case = make_case(lengths, heads, dims, dtype, window, softcap=softcap, sinks=of_heads)
    want, got = case.reference(), case.run()
    assert got.dtype == dtype
    assert got.transpose(1, 2).is_contiguous()
    assert_near(got, want, dtype)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_place_of_each_cache_is_written(dtype: torch.dtype, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KV_KERNELS", kernels)
    case = make_case([1, 128, 129, 70, 300], (6, 3), (64, 48), dtype)
    whole = case.only(range(5)).caches
    assert_near(case.reference(), case.run(), dtype)
    for row, position in enumerate(case.positions):
        for part, before, new in zip(case.caches[row], whole[row], (case.k, case.v), strict=True):
            before[LAYER, 0, :, position] = new[0, :, row]
            assert torch.equal(part.nan_to_num(7.0), before.nan_to_num(7.0))


@pytest.fixture
def threads() -> Iterator[None]:
    """Leave torch's number of threads as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 150])
def test_a_row_is_the_same_whatever_its_company(
    dtype: torch.dtype, window: int | None, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit, beside sequences of any length; natively with any number of threads."""
    monkeypatch.setenv("FUSED_KV_KERNELS", kernels)
    is_native = kernels == "auto" and why_not_native(dtype) is None
    torch.set_num_threads(1)
    case = make_case([700, 1, 129, 64, 301, 555, 128, 400], (9, 3), (64, 64), dtype, window)
    together = case.only(range(8)).run()
    for count in (1, 2, 3, 5) if is_native else (1,):
        torch.set_num_threads(count)
        for rows in ([7], [4, 0], [2, 1, 3], [7, 6, 5, 4, 3, 2, 1, 0]):
            assert torch.equal(case.only(rows).run(), together[:, :, rows])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_native_operator_runs_where_there_is_one(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("this is row by row")

    monkeypatch.setattr(decode_module, "_row_by_row", refused)
    case = make_case([5, 40], (4, 2), (64, 64), dtype)
    case.run()
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    with pytest.raises(RuntimeError, match="row by row"):
        case.run()


@needs_native
def test_processors_without_avx512_equal_the_reference(
    float32_without_avx512: CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "loaded_library", lambda _: float32_without_avx512)
    for heads, dims in (((9, 3), (64, 64)), ((7, 1), (80, 52)), ((5, 5), (34, 98))):
        sinks = torch.linspace(-2.0, 2.0, heads[0])
        for options in ({}, {"softcap": 4.0, "sinks": sinks}):
            case = make_case([1, 130, 77, 400], heads, dims, torch.float32, 200, **options)
            assert_near(case.reference(), case.run(), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_number_that_is_none_is_not_lost(dtype: torch.dtype) -> None:
    case = make_case([300, 300], (4, 2), (64, 64), dtype)
    case.caches[0][0][LAYER, 0, 1, 140, 3] = float("nan")
    got = case.run()
    assert got[0, 2:, 0].isnan().all()
    assert got[0, :2, 0].isfinite().all()
    assert got[0, :, 1].isfinite().all()


def test_caches_that_are_views_are_written_to() -> None:
    """Not dense from layer to layer, or rows apart from each other."""
    case = make_case([5, 40], (4, 2), (64, 64), torch.float32)
    (keys, values), second = case.caches
    for part in (keys, values):
        part.nan_to_num_(0.0)
    apart = [torch.zeros(*part.shape[:4], 2 * part.shape[4])[..., ::2].copy_(part) for part in second]
    wide = torch.zeros(LAYERS, 1, 4, keys.shape[3], 64)
    wide[:, :, 1:3] = keys
    case.caches = [(wide[:, :, 1:3], values), (apart[0], apart[1])]
    want = case.reference()
    assert_near(want, case.run(), torch.float32)
    assert torch.equal(wide[LAYER, 0, 1:3, 4], case.k[0, :, 0])
    assert torch.equal(apart[0][LAYER, 0, :, 39], case.k[0, :, 1])


def test_no_rows_give_an_empty_output() -> None:
    q, k = torch.zeros(1, 4, 0, 16), torch.zeros(1, 2, 0, 16)
    assert decode_attention(q, k, k, DecodeCaches([], []), 0, 1.0).shape == (1, 4, 0, 16)


def test_caches_that_do_not_fit_are_refused() -> None:
    pair = torch.zeros(2, 1, 3, 10, 8), torch.zeros(2, 1, 3, 10, 4)
    other = torch.zeros(2, 1, 2, 10, 8), torch.zeros(2, 1, 2, 10, 4)
    with pytest.raises(ValueError, match="2 caches need as many positions"):
        DecodeCaches([pair, other], [1])
    with pytest.raises(ValueError, match="do not fit together"):
        DecodeCaches([pair, other], [1, 1])
    with pytest.raises(ValueError, match="do not fit together"):
        DecodeCaches([(pair[0], pair[1][:, :, :, :9])], [1])
    for position in (-1, 10):
        with pytest.raises(ValueError, match=f"position {position} lies outside"):
            DecodeCaches([pair], [position])
    with pytest.raises(ValueError, match="named twice"):
        DecodeCaches([pair, pair], [1, 2])


def test_rows_that_do_not_fit_are_refused() -> None:
    case = make_case([5, 40], (4, 2), (16, 16), torch.float32)
    caches = DecodeCaches(case.caches, case.positions)
    with pytest.raises(ValueError, match="not the 2 sequences"):
        decode_attention(case.q[:, :, :1], case.k[:, :, :1], case.v[:, :, :1], caches, 0, 1.0)
    with pytest.raises(ValueError, match="do not fit the caches"):
        decode_attention(case.q.double(), case.k, case.v, caches, 0, 1.0)
    with pytest.raises(ValueError, match="do not fit the caches"):
        decode_attention(case.q, case.k[:, :1], case.v[:, :1], caches, 0, 1.0)
    for layer in (-1, LAYERS):
        with pytest.raises(ValueError, match=f"no layer {layer}"):
            decode_attention(case.q, case.k, case.v, caches, layer, 1.0)
    for firsts, message in (([0, 41], r"first_keys\[1\]=41"), ([0], "not one for each")):
        with pytest.raises(ValueError, match=message):
            decode_attention(case.q, case.k, case.v, caches, 0, 1.0, first_keys=torch.tensor(firsts))
    with pytest.raises(ValueError, match="positive and finite"):
        decode_attention(case.q, case.k, case.v, caches, 0, 1.0, softcap=0.0)
    with pytest.raises(ValueError, match="not one for each of 4 query heads"):
        decode_attention(case.q, case.k, case.v, caches, 0, 1.0, sinks=torch.zeros(3))
