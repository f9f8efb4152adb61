"""Linear layers in eight bits against float32, and their rounding against the same in plain torch."""

from __future__ import annotations

from ctypes import CDLL
from dataclasses import replace

import pytest
import torch
from eight_bit_weights import error, mlp_of, random
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from fused_kv_kernels import (
    UnsupportedOperandsError,
    eight_bit,
    eight_bit_gated_mlp,
    eight_bit_linears,
    eight_bit_weights,
    gated_silu,
    has_eight_bit_linears,
    quantize_rows,
    rms_norm,
    rounded_weights,
    why_not_native,
)
from fused_kv_kernels.native import (
    native_quantize_gated,
    native_scale_rows,
)

SIZES = st.sampled_from([1, 3, 8, 33, 64, 576])

needs_onednn = pytest.mark.skipif(not has_eight_bit_linears(), reason="torch has no eight-bit products here")


@pytest.fixture
def in_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are packed for oneDNN, as on processors without the native operators' instructions."""
    monkeypatch.setattr(rounded_weights, "byte_sizes", lambda _: None)


@settings(max_examples=40)
@given(rows=st.integers(0, 40), dim=SIZES, times=st.sampled_from([1.0, 2.0]), seed=st.integers(0, 99))
def test_rows_are_rounded_by_their_largest_element_or_a_range(rows: int, dim: int, times: float, seed: int) -> None:
    x, factors = random(2, rows, dim, seed=seed), random(dim, seed=seed + 1).abs() + 0.1
    x[:, : rows // 2] *= 100
    want = (x * factors).flatten(0, 1)
    largest = want.abs().amax(1)
    got, scales = quantize_rows(x, factors, None if times == 1 else times * largest)
    assert (got.dtype, got.shape, scales.shape) == (torch.uint8, (2 * rows, dim), (2 * rows,))
    torch.testing.assert_close(scales, times * largest / 127, rtol=1e-6, atol=0)
    whole = got.int() - 128
    assert rows == 0 or int(whole.abs().amax()) in ({127} if times == 1 else {63, 64})
    # Half a step, and what rounding of the quotient adds.
    assert rows == 0 or float(((whole * scales[:, None] - want).abs() / scales[:, None]).max()) <= 0.5001


@pytest.mark.parametrize("ranges", [None, torch.full((5,), 9.0)], ids=["own", "given"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_rows_are_those_of_torch(
    dtype: torch.dtype, ranges: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, factors = random(5, 33).to(dtype), random(33, seed=1).abs()
    x[2] = 0
    got = quantize_rows(x, factors, ranges)
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    want = quantize_rows(x, factors, ranges)
    torch.testing.assert_close(got[1], want[1])
    assert int((got[0].int() - want[0].int()).abs().max()) <= 1, "one where the quotient is half way"
    assert got[0][2].tolist() == [128] * 33


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [1, 7, 8, 15, 16, 17, 33])
def test_rows_are_scaled_in_place_and_nothing_behind_them(dtype: torch.dtype, dim: int) -> None:
    if why_not_native(dtype) is not None:
        pytest.skip("no native operators here")
    whole, scales = random(6, dim).to(dtype), random(5, seed=1)
    scales[3] = float("nan")
    want = torch.cat([(whole[:5].float() * scales[:, None]).to(dtype), whole[5:]])
    native_scale_rows(whole[:5], scales)
    torch.testing.assert_close(whole, want, rtol=0, atol=0, equal_nan=True)


@needs_onednn
@pytest.mark.usefixtures("in_onednn")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_are_scaled_by_the_native_operator(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nearly as torch does, which rounds the scales to the dtype first."""
    if why_not_native(dtype) is not None:
        pytest.skip("no native operators here")
    calls, real = list[torch.Size](), eight_bit.native_scale_rows

    def noting(product: Tensor, scales: Tensor) -> None:
        calls.append(product.shape)
        real(product, scales)

    monkeypatch.setattr(eight_bit, "native_scale_rows", noting)
    x, layers = random(5, 64).to(dtype), [(random(n, 64, seed=n), None) for n in (7, 48)]
    weights = eight_bit_weights(layers, x.abs().amax(0).float())
    got = eight_bit_linears(x, weights)
    assert calls == [(5, 55)]
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    for part, want in zip(got, eight_bit_linears(x, weights), strict=True):
        assert error(part.float(), want.float()) < 0.01
    assert len(calls) == 1


@settings(max_examples=30)
@given(rows=st.integers(1, 9), width=SIZES, seed=st.integers(0, 99))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gated_rows_are_rounded_as_torch_rounds_them(dtype: torch.dtype, rows: int, width: int, seed: int) -> None:
    if why_not_native(dtype) is not None:
        pytest.skip("no native operators here")
    products, scales = random(rows, 2 * width, seed=seed).to(dtype), random(rows, seed=1).abs() + 0.5
    products[0] *= 30
    factors = random(width, seed=2).abs() + 0.1
    got, got_scales = native_quantize_gated(products, scales, factors)
    gated = gated_silu(*(products.float() * scales[:, None]).chunk(2, dim=1))
    want, want_scales = quantize_rows(gated, factors)
    torch.testing.assert_close(got_scales, want_scales, rtol=1e-5, atol=0)
    assert int((got.int() - want.int()).abs().max()) <= 1, "one where the quotient is half way"


@needs_onednn
@settings(max_examples=20)
@given(rows=st.integers(1, 40), width=st.sampled_from([33, 64, 192]), bias=st.booleans(), seed=st.integers(0, 99))
def test_a_gated_mlp_is_near_that_of_float32(rows: int, width: int, bias: bool, seed: int) -> None:
    x = random(2, rows, 96, seed=seed)
    biases = [random(n, seed=n) if bias else None for n in (width, 96)]
    gate, up = ((random(width, 96, seed=seed + n), biases[0]) for n in (1, 2))
    down = (random(96, width, seed=seed + 3), biases[1])
    hidden = gated_silu(*(linear(x, *layer) for layer in (gate, up)))
    of_gate, of_down = (
        eight_bit_weights(layers, of.flatten(0, 1).abs().amax(0)) for layers, of in (([gate, up], x), ([down], hidden))
    )
    got, want = eight_bit_gated_mlp(x, of_gate, of_down), linear(hidden, *down)
    assert got.shape == want.shape
    assert error(got, want) < 0.04


@needs_onednn
@pytest.mark.usefixtures("in_onednn")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_stands_in_an_mlp_is_rounded_by_the_native_operator(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if why_not_native(dtype) is not None:
        pytest.skip("no native operators here")
    calls, real = list[torch.Size](), eight_bit.native_quantize_gated
    monkeypatch.setattr(
        eight_bit, "native_quantize_gated", lambda product, *rest: calls.append(product.shape) or real(product, *rest)
    )
    x, gate_up, down = random(5, 64).to(dtype), *mlp_of(64, 48)
    got = eight_bit_gated_mlp(x, gate_up, down)
    assert calls == [(5, 96)]
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    assert error(got.float(), eight_bit_gated_mlp(x, gate_up, down).float()) < 0.01
    assert len(calls) == 1


@needs_onednn
def test_weights_are_the_same_under_autocast() -> None:
    layers, largest = [(random(48, 64, seed=seed).bfloat16(), None) for seed in (1, 2)], torch.ones(64)
    want = eight_bit_weights(layers, largest)
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype):
            got = eight_bit_weights(layers, largest)
        assert torch.equal(got.scales, want.scales)


@needs_onednn
def test_layers_that_make_no_mlp_are_refused() -> None:
    gate_up, down = mlp_of(64, 48)
    for gates, last in ((gate_up, mlp_of(64, 32)[1]), (down, down), (gate_up, gate_up)):
        with pytest.raises(ValueError, match="MLP with a gate"):
            eight_bit_gated_mlp(random(3, gates.factors.shape[0]), gates, last)


@needs_onednn
def test_a_row_of_an_mlp_that_is_not_finite_stays_that_and_spoils_no_other() -> None:
    x = random(3, 64)
    gate_up, down = mlp_of(64, 48)
    want = eight_bit_gated_mlp(x, gate_up, down)
    x[1, 5] = float("nan")
    got = eight_bit_gated_mlp(x, gate_up, down)
    assert not got[1].isfinite().any()
    assert torch.equal(got[::2], want[::2])


@pytest.mark.parametrize("dim", [1, 7, 8, 9, 33])
def test_bytes_are_those_of_torch_without_avx512(float32_without_avx512: CDLL, dim: int) -> None:
    """And nothing is written behind the last one."""
    x, factors = random(3, dim), random(dim, seed=1).abs()
    got, scales = torch.full((4, dim), 7, dtype=torch.uint8), torch.empty(3)
    float32_without_avx512.fkv_quantize_rows(
        x.data_ptr(), factors.data_ptr(), None, got.data_ptr(), scales.data_ptr(), 3, dim, torch.get_num_threads()
    )
    want = ((x * factors) / scales[:, None]).round() + 128
    assert int((got[:3].int() - want.int()).abs().max()) <= 1, "one where the quotient is half way"
    assert got[3].tolist() == [7] * dim


@needs_onednn
@settings(max_examples=20)
@given(rows=st.integers(1, 40), dim=st.sampled_from([33, 64, 576]), bias=st.booleans(), seed=st.integers(0, 99))
def test_products_are_near_those_of_float32(rows: int, dim: int, bias: bool, seed: int) -> None:
    x = random(2, rows, dim, seed=seed)
    layers = [(random(n, dim, seed=seed + n), random(n, seed=n) if bias and n == 7 else None) for n in (7, 48)]
    got = eight_bit_linears(x, eight_bit_weights(layers, x.flatten(0, 1).abs().amax(0)))
    for part, layer in zip(got, layers, strict=True):
        want = linear(x, *layer)
        assert part.shape == want.shape
        assert error(part, want) < 0.03


@pytest.mark.skipif(not has_eight_bit_linears(torch.bfloat16), reason="torch has no eight-bit products here")
def test_products_of_bfloat16_are_those_of_float32_rounded() -> None:
    x, bias = random(2, 9, 64).bfloat16(), random(48)
    layers = [(random(7, 64, seed=1), None), (random(48, 64, seed=2), bias)]
    weights = eight_bit_weights(layers, x.float().flatten(0, 1).abs().amax(0))
    want = eight_bit_linears(x.float(), weights)
    in_bfloat16 = replace(weights, biases=(None, bias.bfloat16()))
    for got, one in zip(eight_bit_linears(x, in_bfloat16), want, strict=True):
        assert got.dtype == torch.bfloat16
        # Not element by element: a bias can take nearly all of a product away, and leaves its rounding.
        assert error(got.float(), one) < 0.01


def test_weights_are_as_large_as_sums_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    for exact, want in (({127, 63}, 127), ({63}, 63), (set[int](), 0)):
        rounded_weights._largest_weight.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(rounded_weights, "_sums_exactly", lambda largest, _, exact=exact: largest in exact)
            assert rounded_weights._largest_weight() == want
            assert has_eight_bit_linears.__wrapped__() == (want > 0)
    rounded_weights._largest_weight.cache_clear()


@needs_onednn
@pytest.mark.parametrize("largest", [127, 63])
@pytest.mark.usefixtures("in_onednn")
def test_weights_take_all_of_the_range(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_weights, "_largest_weight", lambda: largest)
    weight = random(8, 64)
    weights = eight_bit_weights([(weight, None)], torch.ones(64))
    scaled = weight / weights.factors
    torch.testing.assert_close(weights.scales, scaled.abs().amax(1) / largest)


def test_there_are_no_weights_without_operators_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_weights, "_largest_weight", lambda: 0)
    with pytest.raises(UnsupportedOperandsError, match="oneDNN"):
        eight_bit_weights([(random(8, 64), None)], torch.ones(64))


def test_each_dtype_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounded_weights, "_largest_weight", lambda: 127)
    monkeypatch.setattr(rounded_weights, "_sums_exactly", lambda _, dtype: dtype == torch.float32)
    assert [has_eight_bit_linears.__wrapped__(dtype) for dtype in (torch.float32, torch.bfloat16)] == [True, False]


@needs_onednn
def test_large_channels_cost_no_precision_where_they_are_known() -> None:
    """And much where they are not: the test would show nothing otherwise."""
    x, weight = random(50, 64), random(32, 64, seed=1)
    x[:, 5] = 300
    known, unknown = x.abs().amax(0), torch.ones(64)
    # What the large channel adds is left out: beside it everything is small.
    want = linear(x, weight) - x[:, 5:6] * weight[:, 5]

    def small_part(largest: Tensor) -> Tensor:
        (got,) = eight_bit_linears(x, eight_bit_weights([(weight, None)], largest))
        return got - x[:, 5:6] * weight[:, 5]

    assert error(small_part(known), want) < 0.5 * error(small_part(unknown), want)


@needs_onednn
def test_channels_that_a_sample_hardly_uses_are_not_lost() -> None:
    """As behind relu^2: each row uses few channels, and most of them not as the sample did."""
    sample, x = (random(200, 512, seed=seed).sub(2).relu().square() for seed in (1, 2))
    weight = random(64, 512, seed=3)
    (got,) = eight_bit_linears(x, eight_bit_weights([(weight, None)], sample[:20].amax(0)))
    assert error(got, linear(x, weight)) < 0.06


@needs_onednn
def test_no_rows_and_factors_that_do_not_fit() -> None:
    weights = eight_bit_weights([(random(8, 64), None)], torch.ones(64))
    assert eight_bit_linears(torch.empty(2, 0, 64), weights)[0].shape == (2, 0, 8)
    with pytest.raises(ValueError, match="64 elements and factors"):
        quantize_rows(random(3, 64), torch.ones(63))
    with pytest.raises(ValueError, match=r"3 rows and ranges \[2\]"):
        quantize_rows(random(3, 64), torch.ones(64), torch.ones(2))
    x, factors = random(3, 64), random(64, 2).abs()[:, 0]
    assert torch.equal(quantize_rows(x, factors)[0], quantize_rows(x, factors.clone())[0])


@needs_onednn
def test_factors_do_not_depend_on_last_bits() -> None:
    largest = random(64).abs() + 0.1
    one, two = (eight_bit_weights([(random(8, 64), None)], most) for most in (largest, largest * (1 + 1e-6)))
    assert torch.equal(one.factors, two.factors)
    assert torch.equal(one.scales, two.scales)


@needs_onednn
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_a_row_that_is_not_finite_stays_that_and_alone(
    value: float, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSED_KV_KERNELS", kernels)
    x, weight = random(4, 64), random(8, 64, seed=1)
    weights = eight_bit_weights([(weight, None)], x.abs().amax(0))
    (want,) = eight_bit_linears(x, weights)
    x[1, 7] = value
    (got,) = eight_bit_linears(x, weights)
    assert not got[1].isfinite().any()
    torch.testing.assert_close(got[[0, 2, 3]], want[[0, 2, 3]], rtol=0, atol=0)


def test_operators_that_torch_has_no_more_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: object) -> Tensor:
        raise AttributeError

    def wrong(rows: Tensor, packed: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        return torch.zeros(7, 33)

    for broken in (gone, wrong):
        has_eight_bit_linears.cache_clear()
        rounded_weights._largest_weight.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(rounded_weights, "_product", broken)
            assert not has_eight_bit_linears()
        has_eight_bit_linears.cache_clear()
        rounded_weights._largest_weight.cache_clear()


@needs_onednn
@pytest.mark.usefixtures("in_onednn")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_normed_before_products_in_onednn(dtype: torch.dtype) -> None:
    x, norm, weight = random(5, 64).to(dtype), (random(64, seed=1).to(dtype), 1e-5), random(48, 64, seed=2)
    (got,) = eight_bit_linears(x, eight_bit_weights([(weight.to(dtype), None)], torch.ones(64)), norm)
    assert error(got.float(), linear(rms_norm(x.float(), norm[0].float(), norm[1]), weight)) < 0.03
