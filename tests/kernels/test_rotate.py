"""Key re-rotation: its reference, and that moves compose."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import TOLERANCE, assert_near

from fused_kv_kernels import RotationTable, rerotate_keys, rotation_table
from fused_kv_kernels.reference import rerotate_keys_reference

INV_FREQ = 1.0 / (10000.0 ** (torch.arange(0, 32, 2, dtype=torch.float32) / 32))


def _keys(dim: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 3, 7, dim, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [32, 48], ids=["full_rotary", "partial_rotary"])
def test_equals_reference(dim: int, dtype: torch.dtype) -> None:
    keys, deltas = _keys(dim, dtype), torch.tensor([0, 1, -1, 500, -500, 8000, 17])
    got = rerotate_keys(keys, rotation_table(deltas, INV_FREQ)).to(dtype)
    torch.testing.assert_close(got, rerotate_keys_reference(keys, deltas, INV_FREQ))


@settings(max_examples=60)
@given(a=st.integers(-8000, 8000), b=st.integers(-8000, 8000))
def test_moves_compose(a: int, b: int) -> None:
    keys = _keys(32).double()
    one = rerotate_keys_reference(
        rerotate_keys_reference(keys, torch.full((7,), a), INV_FREQ), torch.full((7,), b), INV_FREQ
    )
    torch.testing.assert_close(
        one, rerotate_keys_reference(keys, torch.full((7,), a + b), INV_FREQ), atol=1e-9, rtol=1e-9
    )
    fast = rerotate_keys(
        rerotate_keys(keys.float(), rotation_table(torch.full((7,), a), INV_FREQ)),
        rotation_table(torch.full((7,), b), INV_FREQ),
    )
    whole = rerotate_keys(keys.float(), rotation_table(torch.full((7,), a + b), INV_FREQ))
    torch.testing.assert_close(fast, whole, atol=3e-6, rtol=3e-6)


def test_a_move_by_nothing_changes_no_bit() -> None:
    keys = _keys(48, torch.bfloat16)
    moved = rerotate_keys(keys, rotation_table(torch.zeros(7, dtype=torch.int64), INV_FREQ))
    assert torch.equal(moved.to(torch.bfloat16), keys)


def test_attention_depends_only_on_distance() -> None:
    """A query and a key moved by the same number of positions keep their product."""
    q, k = _keys(32)[0], _keys(32)[1]
    table = rotation_table(torch.full((7,), 123), INV_FREQ)
    before = (q * k).sum(-1)
    after = (rerotate_keys(q, table) * rerotate_keys(k, table)).sum(-1)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 70),
    shape=st.sampled_from([(64, 64), (80, 80), (96, 32), (128, 128), (256, 256)]),
    interleaved=st.booleans(),
    alike=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_triton_equals_reference(
    tokens: int, shape: tuple[int, int], interleaved: bool, alike: bool, dtype: torch.dtype, device: torch.device
) -> None:
    """Keys as the engine has them: a slice of longer ones, one angle each or one for all."""
    dim, rotary = shape
    generator = torch.Generator().manual_seed(tokens)
    keys = torch.randn(2, 3, tokens + 4, dim, generator=generator).to(device, dtype)[:, :, 1 : tokens + 1]
    inv_freq = 1.0 / (10000.0 ** (torch.arange(0, rotary, 2, dtype=torch.float32) / rotary))
    deltas = torch.randint(-9000, 9000, (1 if alike else tokens,), generator=generator)
    got = rerotate_keys(keys, rotation_table(deltas, inv_freq, interleaved).to(device))
    want = rerotate_keys_reference(keys.float().cpu(), deltas.expand(tokens), inv_freq, interleaved)
    assert got.dtype == torch.float32
    assert_near(got, want, torch.float32)


@pytest.mark.parametrize(("rows", "half"), [(3, 16), (7, 17)], ids=["rows", "dimensions"])
def test_other_angles_are_refused(rows: int, half: int) -> None:
    keys, table = torch.zeros(2, 7, 32), rotation_table(torch.zeros(rows), torch.zeros(half))
    with pytest.raises(ValueError, match=rf"one angle for each key.*\[{rows}, {half}\]"):
        rerotate_keys(keys, table)


@pytest.mark.parametrize("wrong", [torch.zeros(3, 5), torch.zeros(3, 4).double(), torch.zeros(4)], ids=str)
def test_what_is_no_table_is_refused(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="a rotation table needs"):
        RotationTable(torch.ones(3, 4), wrong)


@pytest.mark.parametrize("interleaved", [False, True])
def test_frequencies_of_any_sign(interleaved: bool) -> None:
    """Negative ones rotate the other way, a pair without one keeps every bit."""
    inv_freq = torch.tensor([0.3, -0.2, 0.0, 1.0])
    keys, deltas = _keys(12), torch.tensor([0, 1, -1, 500, -500, 8000, 17])
    moved = rerotate_keys(keys, rotation_table(deltas, inv_freq, interleaved))
    torch.testing.assert_close(moved, rerotate_keys_reference(keys, deltas, inv_freq, interleaved))
    still = [4, 5] if interleaved else [2, 6]
    for dims in (still, list(range(8, 12))):
        assert torch.equal(moved[..., dims], keys[..., dims])
    back = rotation_table(deltas, inv_freq, interleaved).inverse()
    torch.testing.assert_close(rerotate_keys(moved, back), keys)
    torch.testing.assert_close(back.sin, rotation_table(deltas, -inv_freq).sin)
