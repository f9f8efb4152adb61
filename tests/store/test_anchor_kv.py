"""The tensors of a sidecar with anchors: what is read from them is what was kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fused_kv_llm.errors import ConfigError
from fused_kv_llm.store import AnchorKV, AnchorLayout

HEADS, TOKENS, DIM, VALUE_DIM = 2, 30, 16, 10
LAYERS = (1, 2, 4)
FIELDS = ("positions", "keys", "values", "scored_keys")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def kept(dtype: torch.dtype = torch.bfloat16, layers: tuple[int, ...] = LAYERS, every: int = 3) -> AnchorKV:
    keys = (random(6, HEADS, TOKENS, DIM) + 20 * random(6, HEADS, 1, DIM)).to(dtype)
    return AnchorKV.chosen(torch.arange(0, TOKENS, every), keys, random(6, HEADS, TOKENS, VALUE_DIM).to(dtype), layers)


def stored_and_read(before: AnchorKV, storage: str, layers: tuple[int, ...] = LAYERS) -> AnchorKV:
    layout = AnchorLayout(layers, before.keys.dtype, TOKENS, (HEADS, DIM, VALUE_DIM))
    side = before.tensors(layers, storage)
    assert layout.fits(side)
    return AnchorKV.of(side, layout)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("layers", [LAYERS, (0,), (0, 1, 2), (5,)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_stored_as_it_is_comes_back(dtype: torch.dtype, layers: tuple[int, ...], every: int) -> None:
    before = kept(dtype, layers, every)
    after = stored_and_read(before, "auto", layers)
    assert after.positions.dtype == torch.int64
    for name in FIELDS:
        assert torch.equal(getattr(after, name), getattr(before, name))


def test_nothing_is_stored_twice() -> None:
    """Keys of the anchors are among those of all tokens in the layers that score; what scores last needs no values."""
    side = kept().tensors(LAYERS, "auto")
    assert {name: part.shape[0] for name, part in side.items()} == {
        "positions": 10, "other_keys": 2, "values": 4, "scored_keys": 3,
    }  # fmt: skip
    assert side["other_keys"].shape[2] == 10


@pytest.mark.parametrize("layers", [LAYERS, (0,)], ids=str)
def test_eight_bits_are_half_a_step_off_and_take_half_the_bytes(layers: tuple[int, ...]) -> None:
    before = kept(layers=layers)
    after = stored_and_read(before, "int8", layers)
    assert torch.equal(after.positions, before.positions)
    for field, axis in (("values", 3), ("scored_keys", 2)):
        want, got = getattr(before, field).float(), getattr(after, field)
        assert got.dtype == torch.bfloat16
        largest = want.abs().amax(axis, keepdim=True) if want.numel() else want
        # Half a step, and the rounding to bfloat16.
        assert ((got.float() - want).abs() <= largest * (0.51 / 127 + 2**-8)).all()
        side = before.tensors(layers, "int8")
        assert side[field].nbytes * 2 == getattr(before, field).nbytes
        assert side[f"{field}_scale"].shape[axis] == 1
    assert after.keys.shape == before.keys.shape
    assert torch.allclose(after.keys.float(), before.keys.float(), rtol=0, atol=1.0)


@pytest.mark.parametrize("layers", [LAYERS, (0,)], ids=str)
def test_four_bits_are_half_a_step_off_whatever_the_mean_of_the_keys(layers: tuple[int, ...]) -> None:
    before = kept(torch.float32, layers, every=1)
    after = stored_and_read(before, "int4", layers)
    for field in ("keys", "values", "scored_keys"):
        want, got = getattr(before, field), getattr(after, field)
        assert got.shape == want.shape
        of = want if field == "values" else want - want.mean(2, keepdim=True)
        steps = (of.amax(-1, keepdim=True) - of.amin(-1, keepdim=True)) / 15 if of.numel() else of
        # Half a step, and the rounding of means, scales and minima to float16.
        assert ((got - want).abs() <= 0.52 * steps + want.abs() * 2**-10).all()


@pytest.mark.parametrize(("dims", "share"), [((64, 64), 0.22), ((80, 80), 0.24), ((96, 96), 0.24), ((72, 40), 0.25),
                                             ((128, 128), 0.22), ((256, 256), 0.22), ((33, 17), 0.27)])  # fmt: skip
def test_four_bits_take_little_more_than_a_quarter_of_the_bytes(dims: tuple[int, int], share: float) -> None:
    """Of 24 of 30 layers, the last without values: about as many as all layers have of a model in bfloat16."""
    keys, values = (random(24, 3, 120, dim).bfloat16() for dim in dims)
    layers = tuple(range(7, 24))
    before = AnchorKV.chosen(torch.arange(120), keys, values, layers)
    side = before.tensors(layers, "int4")
    whole = (keys.nbytes + values.nbytes) / 24 * 30
    assert share - 0.02 < sum(part.nbytes for part in side.values()) / whole < share + 0.01
    layout = AnchorLayout(layers, torch.bfloat16, 120, (3, *dims))
    assert layout.fits(side)
    after = AnchorKV.of(side, layout)
    for name in FIELDS:
        assert getattr(after, name).shape == getattr(before, name).shape
        torch.testing.assert_close(getattr(after, name).float(), getattr(before, name).float(), rtol=0, atol=0.35)


@pytest.mark.parametrize("storage", ["int8", "int4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e9])
def test_what_few_bits_cannot_hold_is_said(storage: str, value: float) -> None:
    before = kept()
    before.keys[0, 0, 0, 0] = value
    with pytest.raises(ConfigError, match=f"too large for anchors in {storage}, or NaN.*storage='auto'"):
        before.tensors(LAYERS, storage)
