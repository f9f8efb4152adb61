"""Linear layers in eight bits against float32, and their rounding against the same in plain torch."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from fused_kv_kernels import (
    EightBitWeights,
    UnsupportedOperandsError,
    eight_bit,
    eight_bit_attended_mlp,
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
    byte_panels,
    byte_rows,
    multiplies_bytes,
    native_eight_bit_mlp,
    native_quantize_gated,
    native_scale_rows,
)

SIZES = st.sampled_from([1, 3, 8, 33, 64, 576])

needs_onednn = pytest.mark.skipif(not has_eight_bit_linears(), reason="torch has no eight-bit products here")


needs_bytes = pytest.mark.skipif(
    not has_eight_bit_linears() or not multiplies_bytes(torch.float32), reason="no native eight-bit products here"
)


@pytest.fixture
def in_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are packed for oneDNN, as on processors without the native operators' instructions."""
    monkeypatch.setattr(rounded_weights, "multiplies_bytes", lambda _: False)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp_of(inner: int, width: int) -> tuple[EightBitWeights, EightBitWeights]:
    """The weights of a gate with up beside it, and of what reads their product."""
    gate_up = eight_bit_weights([(random(width, inner, seed=seed), None) for seed in (1, 2)], torch.ones(inner))
    return gate_up, eight_bit_weights([(random(32, width, seed=3), None)], torch.ones(width))


def error(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


@settings(max_examples=40)
@given(rows=st.integers(0, 40), dim=SIZES, most=st.sampled_from([63, 127]), seed=st.integers(0, 99))
def test_rows_are_rounded_by_their_own_largest_element(rows: int, dim: int, most: int, seed: int) -> None:
    x, factors = random(2, rows, dim, seed=seed), random(dim, seed=seed + 1).abs() + 0.1
    x[:, : rows // 2] *= 100
    got, scales = quantize_rows(x, factors, most)
    assert (got.dtype, got.shape, scales.shape) == (torch.uint8, (2 * rows, dim), (2 * rows,))
    want = (x * factors).flatten(0, 1)
    torch.testing.assert_close(scales, want.abs().amax(1) / most, rtol=1e-6, atol=0)
    whole = got.int() - 128
    assert rows == 0 or int(whole.abs().amax()) == most
    # Half a step, and what rounding of the quotient adds.
    assert rows == 0 or float(((whole * scales[:, None] - want).abs() / scales[:, None]).max()) <= 0.5001


@pytest.mark.parametrize("most", [63, 127])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_native_rows_are_those_of_torch(dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, factors = random(5, 33).to(dtype), random(33, seed=1).abs()
    x[2] = 0
    got = quantize_rows(x, factors, most)
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    want = quantize_rows(x, factors, most)
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
    got, got_scales = native_quantize_gated(products, scales, factors, 127)
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
    with pytest.raises(ValueError, match="most=200"):
        quantize_rows(random(3, 8), torch.ones(8), 200)


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
        *(part.data_ptr() for part in (x, factors, got, scales)), 3, dim, 127, torch.get_num_threads()
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


# -- native products ---------------------------------------------------------------------------------------------


@given(outputs=st.integers(1, 200), inputs=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_panels_hold_all_weights(outputs: int, inputs: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    panels, begins = byte_panels(rows)
    assert panels.shape == (-(-outputs // 64), -(-inputs // 4), 64)
    assert torch.equal(byte_rows(panels, outputs, inputs), rows)
    assert torch.equal(begins[:outputs], -128 * rows.sum(1, dtype=torch.int32))
    assert begins[outputs:].eq(0).all()


@needs_bytes
@given(
    rows=st.integers(0, 230), inputs=st.integers(1, 150), outputs=st.integers(1, 150), threads=st.integers(1, 3),
    normed=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60)
def test_native_products_are_those_of_rounded_numbers(
    rows: int, inputs: int, outputs: int, threads: int, normed: bool, seed: int
) -> None:
    x, norm = random(rows, inputs, seed=seed), (random(inputs, seed=seed + 1), 1e-5) if normed else None
    weights = eight_bit_weights([(random(outputs, inputs, seed=seed + 2), None)], random(inputs, seed=seed).abs())
    used = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        (got,) = eight_bit_linears(x, weights, norm)
    finally:
        torch.set_num_threads(used)
    rounded, scales = quantize_rows(x if norm is None else rms_norm(x, *norm), weights.factors)
    want = (rounded.double() - 128) * scales[:, None] @ byte_rows(weights.packed, outputs, inputs).double().T
    want *= weights.scales
    # Rounding to bytes may take a number that stands between two of them to either.
    bound = 1e-5 if norm is None else 0.01
    assert rows == 0 or float((got - want).norm()) <= bound * float(want.norm()) + 1e-6


@needs_bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "inputs", "width"), [(1, 64, 64), (100, 70, 128), (333, 576, 192)])
def test_half_a_decoder_layer_is_near_its_parts(dtype: torch.dtype, rows: int, inputs: int, width: int) -> None:
    if why_not_native(dtype) is not None:
        pytest.skip("no native operators here")
    x, attended = random(1, rows, inputs).to(dtype), random(1, rows, 36, seed=1).to(dtype)
    norm = random(inputs, seed=2).to(dtype), 1e-5
    sizes = [(inputs, 36), (width, inputs), (width, inputs), (inputs, width)]
    output, gate, up, down = (random(*one, seed=3 + n).div(one[1] ** 0.5) for n, one in enumerate(sizes))
    rounded = [
        eight_bit_weights([(one.to(dtype), None) for one in layers], torch.ones(layers[0].shape[1]))
        for layers in ([output], [gate, up], [down])
    ]
    got = eight_bit_attended_mlp(x, attended, rounded[0], norm, rounded[1], rounded[2])
    hidden = x.float() + linear(attended.float(), output)
    normal = rms_norm(hidden, norm[0].float(), norm[1])
    added = linear(torch.nn.functional.silu(linear(normal, gate)) * linear(normal, up), down)
    assert (got.dtype, got.shape) == (dtype, x.shape)
    assert error(got.float() - x.float(), hidden + added - x.float()) < 0.03
    parts = x + eight_bit_linears(attended, rounded[0])[0]
    parts = parts + eight_bit_gated_mlp(rms_norm(parts, *norm), rounded[1], rounded[2])
    assert error(got.float(), parts.float()) < (1e-3 if dtype == torch.float32 else 0.01)


@needs_bytes
@pytest.mark.parametrize("of", [("output",), ("down",), ("gate",), ("output", "down")])
def test_biases_in_half_a_decoder_layer_are_added(of: tuple[str, ...]) -> None:
    x, attended, norm = random(5, 64), random(5, 36, seed=1), (torch.ones(64), 1e-5)
    bias = random(64, seed=9)
    output = eight_bit_weights([(random(64, 36, seed=2), bias if "output" in of else None)], torch.ones(36))
    gates = [(random(64, 64, seed=n), bias if "gate" in of and n == 3 else None) for n in (3, 4)]
    gate_up = eight_bit_weights(gates, torch.ones(64))
    down = eight_bit_weights([(random(64, 64, seed=5), bias if "down" in of else None)], torch.ones(64))
    hidden = x + eight_bit_linears(attended, output)[0]
    gate, up = eight_bit_linears(hidden, gate_up, norm)
    want = hidden + eight_bit_linears(gated_silu(gate, up), down)[0]
    assert error(eight_bit_attended_mlp(x, attended, output, norm, gate_up, down), want) < 1e-3


@needs_bytes
def test_half_a_decoder_layer_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[torch.Size]()

    def noting(x: Tensor, *operands: object) -> Tensor:
        calls.append(x.shape)
        return native_eight_bit_mlp(x, *operands)  # type: ignore[arg-type]

    monkeypatch.setattr(eight_bit, "native_eight_bit_mlp", noting)
    gate_up, _ = mlp_of(64, 128)
    output, down = (eight_bit_weights([(random(64, n), None)], torch.ones(n)) for n in (36, 128))
    x, attended, norm = random(5, 64), random(5, 36, seed=1), (random(64), 1e-5)
    got = eight_bit_attended_mlp(x, attended, output, norm, gate_up, down)
    assert calls == [x.shape]
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    # The weights stay packed as they are.
    assert error(got, eight_bit_attended_mlp(x, attended, output, norm, gate_up, down)) < 0.01
    assert len(calls) == 1


@needs_bytes
@pytest.mark.parametrize("where", ["x", "attended"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_of_half_a_layer_that_is_not_finite_spoils_no_other(where: str, value: float) -> None:
    gate_up, _ = mlp_of(64, 128)
    output, down = (eight_bit_weights([(random(64, n), None)], torch.ones(n)) for n in (36, 128))
    rows = {"x": random(30, 64), "attended": random(30, 36, seed=1)}
    want = eight_bit_attended_mlp(*rows.values(), output, (torch.ones(64), 1e-5), gate_up, down)
    rows[where][7, 3] = value
    got = eight_bit_attended_mlp(*rows.values(), output, (torch.ones(64), 1e-5), gate_up, down)
    assert not got[7].isfinite().any()
    others = [row for row in range(30) if row != 7]
    assert torch.equal(got[others], want[others])


@needs_onednn
def test_operands_that_do_not_fit_together_are_refused() -> None:
    gate_up, short = mlp_of(64, 128)
    output, down = (eight_bit_weights([(random(64, n), None)], torch.ones(n)) for n in (36, 128))
    x, attended, norm = random(5, 64), random(5, 36), (torch.ones(64), 1e-5)
    with pytest.raises(ValueError, match="63 elements and layers of 64 inputs"):
        eight_bit_linears(random(5, 63), gate_up)
    with pytest.raises(ValueError, match="norm"):
        eight_bit_linears(x, gate_up, (torch.ones(63), 1e-5))
    with pytest.raises(ValueError, match="63 elements and layers of 64 inputs"):
        eight_bit_gated_mlp(random(5, 63), gate_up, down)
    wrong = eight_bit_weights([(random(32, 36), None)], torch.ones(36))
    with pytest.raises(ValueError, match="attended rows"):
        eight_bit_attended_mlp(x, attended, wrong, norm, gate_up, down)
    for rows in (attended[:4], attended.bfloat16()):
        with pytest.raises(ValueError, match="attended rows"):
            eight_bit_attended_mlp(x, rows, output, norm, gate_up, down)
    with pytest.raises(ValueError, match="attended rows"):
        eight_bit_attended_mlp(x, attended, output, norm, gate_up, short)
    with pytest.raises(ValueError, match="128 elements and layers of 36 inputs"):
        eight_bit_attended_mlp(x, random(5, 128), output, norm, gate_up, down)


@needs_bytes
def test_processors_with_tiles_multiply_in_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["fused_kv_kernels.native.eight_bit_layers"]
    real = module.processor_features()
    assert multiplies_bytes(torch.float32)
    monkeypatch.setattr(module, "processor_features", lambda: real | {"amx_int8"})
    assert not multiplies_bytes(torch.float32)
    assert eight_bit_weights([(random(8, 64), None)], torch.ones(64)).begins is None


@needs_onednn
@pytest.mark.usefixtures("in_onednn")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_normed_before_products_in_onednn(dtype: torch.dtype) -> None:
    x, norm, weight = random(5, 64).to(dtype), (random(64, seed=1).to(dtype), 1e-5), random(48, 64, seed=2)
    (got,) = eight_bit_linears(x, eight_bit_weights([(weight.to(dtype), None)], torch.ones(64)), norm)
    assert error(got.float(), linear(rms_norm(x.float(), norm[0].float(), norm[1]), weight)) < 0.03


@needs_bytes
def test_norms_that_are_not_dense_are_computed_before() -> None:
    x, sparse = random(5, 64), random(64, 2, seed=1)[:, 0]
    gate_up, _ = mlp_of(64, 128)
    output, down = (eight_bit_weights([(random(64, n), None)], torch.ones(n)) for n in (36, 128))
    for one, other in zip(*(eight_bit_linears(x, gate_up, (w, 1e-5)) for w in (sparse, sparse.clone())), strict=True):
        assert error(one, other) < 0.01
    attended = random(5, 36, seed=2)
    ends = [
        eight_bit_attended_mlp(x, attended, output, (w, 1e-5), gate_up, down) for w in (sparse, sparse.contiguous())
    ]
    assert error(*ends) < 0.01


@needs_bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_depend_on_no_other_whatever_the_threads_and_the_layout(dtype: torch.dtype) -> None:
    if why_not_native(dtype) is not None:
        pytest.skip("no native operators here")
    x, attended, norm = random(2, 350, 576).to(dtype), random(2, 350, 192, seed=1).to(dtype), torch.ones(576).to(dtype)
    sizes = [(576, 192), (1536, 576), (1536, 576), (576, 1536)]
    output, gate, up, down = (random(*one, seed=n).to(dtype) for n, one in enumerate(sizes))
    weights = [
        eight_bit_weights([(one, None) for one in layers], torch.ones(layers[0].shape[1]))
        for layers in ([output], [gate, up], [down])
    ]

    def both(rows: Tensor, of: Tensor) -> list[Tensor]:
        whole = eight_bit_attended_mlp(rows, of, weights[0], (norm, 1e-5), *weights[1:])
        return [whole, *eight_bit_linears(rows, weights[1], (norm, 1e-5))]

    want, used = both(x, attended), torch.get_num_threads()
    spread = [part.transpose(0, 1).contiguous().transpose(0, 1) for part in (x, attended)]
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            for got in (both(x, attended), both(*spread)):
                assert all(map(torch.equal, got, want))
    finally:
        torch.set_num_threads(used)
    some = both(x[:, 10:77], attended[:, 10:77])
    assert all(torch.equal(got, of_all[:, 10:77]) for got, of_all in zip(some, want, strict=True))
    with ThreadPoolExecutor(4) as pool:
        for got in pool.map(lambda _: both(x, attended), range(8)):
            assert all(map(torch.equal, got, want))
