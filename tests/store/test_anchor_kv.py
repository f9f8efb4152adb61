"""The tensors of a sidecar with anchors: what is read from them is what was kept."""

from __future__ import annotations

import pytest
import torch

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store import AnchorKV

LAYERS, HEADS, TOKENS, DIM = 4, 2, 30, 16


def kept(dtype: torch.dtype = torch.bfloat16) -> AnchorKV:
    numbers = torch.Generator().manual_seed(3)
    keys, values = torch.randn(2, LAYERS, HEADS, TOKENS, DIM, generator=numbers).to(dtype)
    chosen = torch.arange(0, TOKENS, 3)
    return AnchorKV(chosen, keys[:3, :, chosen], values[:3, :, chosen], keys[2:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_stored_as_it_is_comes_back(dtype: torch.dtype) -> None:
    before = kept(dtype)
    after = AnchorKV.of(before.tensors("auto"), torch.float32)
    assert after.positions.dtype == torch.int64
    for name in ("positions", "keys", "values", "scored_keys"):
        assert torch.equal(getattr(after, name), getattr(before, name))


def test_eight_bits_are_half_a_step_off_and_take_half_the_bytes() -> None:
    before = kept()
    side = before.tensors("int8")
    after = AnchorKV.of(side, torch.bfloat16)
    assert torch.equal(after.positions, before.positions)
    for field, name, axis in (("keys", "keys", 2), ("values", "values", 3), ("scored_keys", "critical_keys", 2)):
        want, got = getattr(before, field).float(), getattr(after, field)
        assert got.dtype == torch.bfloat16
        largest = want.abs().amax(axis, keepdim=True)
        # Half a step, and the rounding to bfloat16.
        assert ((got.float() - want).abs() <= largest * (0.51 / 127 + 2**-8)).all()
        assert side[name].nbytes * 2 == getattr(before, field).nbytes
        assert side[f"{name}_scale"].shape[axis] == 1


def test_what_eight_bits_cannot_hold_is_said() -> None:
    before = kept()
    before.keys[0, 0, 0, 0] = float("nan")
    with pytest.raises(ConfigError, match="storage='auto'"):
        before.tensors("int8")
