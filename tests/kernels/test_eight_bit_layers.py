"""Native linear layers, MLPs and halves of decoder layers in eight bits, against sums of the rounded numbers."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from eight_bit_weights import error, mlp_of, random, weights_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import linear

from fused_kv_kernels import (
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
from fused_kv_kernels.native import byte_panels, byte_rows, byte_sizes, native_eight_bit_mlp

needs_onednn = pytest.mark.skipif(not has_eight_bit_linears(), reason="torch has no eight-bit products here")
pytestmark = pytest.mark.usefixtures("byte_instructions")
needs_bytes = pytest.mark.skipif(
    rounded_weights._native_sizes(torch.float32) is None, reason="no native eight-bit products here"
)


@given(outputs=st.integers(1, 200), inputs=st.integers(1, 70), panel=st.sampled_from([16, 64]), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_panels_hold_all_weights(outputs: int, inputs: int, panel: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-127, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    panels, begins = byte_panels(rows, panel)
    assert panels.shape == (-(-outputs // panel), -(-inputs // 4), panel)
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
def test_half_a_decoder_layer_is_near_its_parts(
    byte_instructions: str, dtype: torch.dtype, rows: int, inputs: int, width: int
) -> None:
    if why_not_native(dtype) is not None or (byte_instructions, dtype) == ("avx2", torch.bfloat16):
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
    output, down = (weights_of(64, n) for n in (36, 128))
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
    output, down = (weights_of(64, n) for n in (36, 128))
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
    output, down = (weights_of(64, n) for n in (36, 128))
    x, attended, norm = random(5, 64), random(5, 36), (torch.ones(64), 1e-5)
    with pytest.raises(ValueError, match="63 elements and layers of 64 inputs"):
        eight_bit_linears(random(5, 63), gate_up)
    with pytest.raises(ValueError, match="norm"):
        eight_bit_linears(x, gate_up, (torch.ones(63), 1e-5))
    with pytest.raises(ValueError, match="63 elements and layers of 64 inputs"):
        eight_bit_gated_mlp(random(5, 63), gate_up, down)
    wrong = weights_of(32, 36)
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
    assert byte_sizes(torch.float32) is not None
    monkeypatch.setattr(module, "processor_features", lambda: real | {"amx_int8"})
    assert byte_sizes(torch.float32) is None
    assert weights_of(8, 64).begins is None


@needs_bytes
def test_norms_that_are_not_dense_are_computed_before() -> None:
    x, sparse = random(5, 64), random(64, 2, seed=1)[:, 0]
    gate_up, _ = mlp_of(64, 128)
    output, down = (weights_of(64, n) for n in (36, 128))
    for one, other in zip(*(eight_bit_linears(x, gate_up, (w, 1e-5)) for w in (sparse, sparse.clone())), strict=True):
        assert error(one, other) < 0.01
    attended = random(5, 36, seed=2)
    ends = [
        eight_bit_attended_mlp(x, attended, output, (w, 1e-5), gate_up, down) for w in (sparse, sparse.contiguous())
    ]
    assert error(*ends) < 0.01


@needs_bytes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_depend_on_no_other_whatever_the_threads_and_the_layout(
    byte_instructions: str, dtype: torch.dtype
) -> None:
    if why_not_native(dtype) is not None or (byte_instructions, dtype) == ("avx2", torch.bfloat16):
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


@needs_bytes
def test_numbers_behind_a_norm_are_not_read() -> None:
    x, behind = random(5, 70), torch.full((128,), float("nan"))
    behind[:70] = random(70, seed=1)
    weights = weights_of(48, 70)
    (got,), (want,) = (eight_bit_linears(x, weights, (one, 1e-5)) for one in (behind[:70], behind[:70].clone()))
    assert torch.equal(got, want)


@needs_bytes
@pytest.mark.parametrize("largest", [63, 127])
def test_onednn_multiplies_where_only_it_has_instructions_for_whole_bytes(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = byte_sizes(torch.float32)
    assert sizes is not None
    monkeypatch.setattr(rounded_weights, "_largest_weight", lambda: largest)
    assert (weights_of(8, 64).begins is None) == (sizes.adds_pairs and largest == 127)


@needs_bytes
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1, 2)])
def test_panels_of_another_size_are_multiplied_in_torch(which: tuple[int, ...]) -> None:
    sizes = byte_sizes(torch.float32)
    assert sizes is not None
    gate_up, _ = mlp_of(64, 128)
    weights = [weights_of(64, 36), gate_up, weights_of(64, 128)]
    x, attended, norm = random(5, 64), random(5, 36, seed=1), (random(64), 1e-5)

    def both() -> list[Tensor]:
        output, gate_up, down = weights
        whole = eight_bit_attended_mlp(x, attended, output, norm, gate_up, down)
        return [whole, eight_bit_gated_mlp(x, gate_up, down), *eight_bit_linears(attended, output)]

    want = both()
    for number in which:
        one = weights[number]
        rows = byte_rows(one.packed, sum(one.sizes), one.factors.shape[0])
        packed, begins = byte_panels(rows.contiguous(), 80 - sizes.panel)
        weights[number] = replace(one, packed=packed, begins=begins)
    for got, of_usual in zip(both(), want, strict=True):
        assert error(got, of_usual) < 0.01


@needs_bytes
def test_sums_of_the_largest_numbers_are_exact() -> None:
    """Products of two neighbours are as large as the sixteen bits that AVX2 adds them up in allow."""
    sizes = byte_sizes(torch.float32)
    assert sizes is not None
    weight = torch.ones(48, 576)
    weight[::2] = -1
    weight[16:32, ::2] = 0
    weights = eight_bit_weights([(weight, None)], torch.ones(576))
    (got,) = eight_bit_linears(torch.ones(7, 576), weights)
    rows = byte_rows(weights.packed, 48, 576).int()
    pairs = rows.unflatten(1, (-1, 2)).sum(2).abs()
    assert pairs[16:32].eq(127).all()
    assert pairs[:16].eq(128 if sizes.adds_pairs else 254).all()
    torch.testing.assert_close(got, (rows.sum(1) * weights.scales).expand(7, 48))


@needs_bytes
@given(outputs=st.integers(1, 70), inputs=st.integers(1, 70), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_weights_are_as_large_as_their_sums_stay_exact(outputs: int, inputs: int, seed: int) -> None:
    """With inputs of one sign, which are the largest bytes there are."""
    sizes = byte_sizes(torch.float32)
    assert sizes is not None
    weight = random(outputs, inputs, seed=seed).pow(3)
    weights = eight_bit_weights([(weight, None)], torch.ones(inputs))
    rows = byte_rows(weights.packed, outputs, inputs).int()
    pairs = torch.nn.functional.pad(rows, (0, inputs % 2)).unflatten(1, (-1, 2)).sum(2).abs().amax(1)
    largest = rows.abs().amax(1)
    if sizes.adds_pairs:
        assert (torch.maximum(pairs, largest) >= 126).all()
        assert (pairs <= 128).all()
    else:
        assert (largest == 127).all()
    # Whatever the factors, these inputs are all as large once they are multiplied.
    (got,) = eight_bit_linears(1.0 / weights.factors.expand(6, -1), weights)
    torch.testing.assert_close(got, (rows.sum(1) * weights.scales).expand(6, -1), rtol=1e-5, atol=1e-4)


@needs_bytes
def test_products_in_torch_have_the_dtype_of_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, x = weights_of(8, 64), random(5, 64).bfloat16()
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    (got,) = eight_bit_linears(x, weights)
    assert (got.dtype, got.shape) == (torch.bfloat16, (5, 8))
