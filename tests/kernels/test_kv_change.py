"""Sums of what prompts change in KV, and their rows in eight bits, against the same in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fused_kv_kernels import RotationTable, add_change, compress_rows, kv_change, rotation_table, why_not_native
from fused_kv_kernels.reference import rerotate_keys_reference

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LAYERS, HEADS = 3, 2


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def frequencies(rotary: int) -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / max(rotary, 1)))


@settings(max_examples=60)
@given(
    tokens=st.integers(0, 40),
    shape=st.sampled_from([(64, 64), (80, 80), (96, 32), (128, 128), (6, 4)]),
    interleaved=st.booleans(),
    alike=st.booleans(),
    dtypes=st.tuples(DTYPES, DTYPES),
    moves=st.lists(st.integers(-9000, 9000), min_size=1, max_size=3),
)
def test_the_changes_of_prompts_are_summed_up(
    tokens: int,
    shape: tuple[int, int],
    interleaved: bool,
    alike: bool,
    dtypes: tuple[torch.dtype, torch.dtype],
    moves: list[int],
) -> None:
    """Slices of longer tensors, keys that are turned, in the same dtype as before or in another."""
    dim, rotary = shape
    before = random(LAYERS, HEADS, tokens + 3, dim, seed=tokens).to(dtypes[0])[:, :, 2 : tokens + 2]
    bases = [frequencies(rotary) * (1 if alike else 1 + layer) for layer in range(LAYERS)]
    got, want = None, torch.zeros(LAYERS, HEADS, tokens, dim, dtype=torch.float64)
    for number, move in enumerate(moves):
        after = random(LAYERS, HEADS, tokens + 4, dim, seed=100 + number).to(dtypes[1])[:, :, 1 : tokens + 1]
        one = rotation_table(torch.tensor([move]), bases[0], interleaved)
        tables = [one if alike else rotation_table(torch.tensor([move]), base, interleaved) for base in bases]
        got = add_change(got, after, before, 0.3 + number, tables)
        deltas = torch.full((tokens,), move)
        turned = [
            rerotate_keys_reference(layer.double(), deltas, base, interleaved)
            for layer, base in zip(after, bases, strict=True)
        ]
        want += (0.3 + number) * (torch.stack(turned) - before.double())
    assert got is not None
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("layout", ["every other row", "part of wider rows", "part of wider rows before"])
def test_rows_that_are_not_dense(layout: str) -> None:
    after, before = random(2, 3, 7, 32, seed=1), random(2, 3, 7, 32, seed=2)
    if layout == "every other row":
        after = random(2, 3, 14, 32, seed=1)[:, :, ::2]
    elif layout == "part of wider rows":
        after = random(2, 3, 7, 64, seed=1)[..., :32]
    else:
        before = random(2, 3, 7, 64, seed=2)[..., :32]
    torch.testing.assert_close(add_change(None, after, before, 0.5), 0.5 * (after - before))


@pytest.mark.parametrize("after_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kv_of_either_dtype_is_added_by_the_native_operator(
    after_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain KV in float32 too, beside KV of a pass whose attention is in bfloat16."""
    if why_not_native(after_dtype) is not None or why_not_native(torch.float32) is not None:
        pytest.skip("no native operators here")
    calls = list[torch.dtype]()
    for name in ("native_add_change", "native_compress_rows"):
        real = getattr(kv_change, name)

        def noting(x: torch.Tensor, *rest: Any, real: Any = real, **options: Any) -> Any:
            calls.append(x.dtype)
            return real(x, *rest, **options)

        monkeypatch.setattr(kv_change, name, noting)
    before, after = random(2, 3, 70, 48, seed=1), random(2, 3, 70, 48, seed=2).to(after_dtype)
    for plain in (before, before.to(after_dtype)):
        got = add_change(None, after, plain, 0.5)
        torch.testing.assert_close(got, 0.5 * (after.float() - plain.float()))
    assert calls == [torch.float32] * 2
    compress_rows(got)
    assert len(calls) == 3


def test_rows_of_another_dtype_or_layout_are_compressed_too() -> None:
    x = random(5, 64, seed=4)
    for rows in (x[:, :32], x[::2], x.bfloat16(), x.double()):
        whole, scales = compress_rows(rows)
        want = rows.float()
        step = want.abs().amax(-1, keepdim=True) / 127
        assert bool(((whole * scales.float() - want).abs() <= 0.52 * step).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_does_not_change_sums_up_to_nothing(dtype: torch.dtype) -> None:
    same = random(2, 3, 7, 48, seed=1).to(dtype) * 100
    sums = add_change(add_change(None, same, same, 0.7), same, same, 0.3)
    assert not sums.any()


def test_without_native_operators_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = random(2, 3, 7, 48, seed=1), random(2, 3, 7, 48, seed=2)
    tables = [rotation_table(torch.tensor([77]), frequencies(32))] * 2
    got = add_change(add_change(None, after, before, 0.7, tables), before, after, 0.4)
    small = compress_rows(got)
    monkeypatch.setenv("FUSED_KV_KERNELS", "torch")
    want = add_change(add_change(None, after, before, 0.7, tables), before, after, 0.4)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    others = compress_rows(want)
    torch.testing.assert_close(small[1], others[1])
    assert int((small[0].int() - others[0].int()).abs().max()) <= 1, "one where the quotient is half way"


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    rows=st.integers(0, 30), dim=st.sampled_from([1, 3, 16, 33, 64]), size=st.floats(1e-6, 1e6), seed=st.integers(0, 9)
)
def test_rows_keep_half_a_step(rows: int, dim: int, size: float, seed: int) -> None:
    x = size * random(2, rows, dim, seed=seed)
    x[:, : rows // 3] = 0
    whole, scales = compress_rows(x)
    assert (whole.dtype, whole.shape, scales.shape) == (torch.int8, x.shape, (2, rows, 1))
    assert bool((scales > 0).all())
    step = x.abs().amax(-1, keepdim=True) / 127 if rows else scales
    assert bool(((whole * scales - x).abs() <= 0.501 * step).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_has_a_scale_that_is_not(bad: float) -> None:
    x = random(3, 33, seed=3)
    x[1, 20] = bad
    scales = compress_rows(x)[1]
    assert scales.isfinite().flatten().tolist() == [True, False, True]


def test_what_does_not_fit_together_is_refused() -> None:
    part = random(2, 3, 7, 48, seed=1)
    table = rotation_table(torch.tensor([1]), frequencies(48))
    rows = RotationTable(torch.zeros(7, 24), torch.zeros(7, 24))
    wide = rotation_table(torch.tensor([1]), frequencies(64))
    for sums, after, before, tables in (
        (None, part, part[:1], ()),
        (None, part[0], part[0], ()),
        (part[:, :2], part, part, ()),
        (part.mT.contiguous().mT, part, part, ()),
        (part.bfloat16(), part, part, ()),
        (None, part[0, 0, 0, 0], part[0, 0, 0, 0], ()),
        (None, part, part.to("meta"), ()),
        (None, part, part, [table.to("meta")] * 2),
        (None, part, part, [table]),
        (None, part, part, [rows] * 2),
        (None, part, part, [wide] * 2),
    ):
        with pytest.raises(ValueError, match="fit together"):
            add_change(sums, after, before, 0.5, tables)
