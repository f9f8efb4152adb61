"""The context shift: eight bits a number, and how much of it a place gets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_kernels import rerotate_keys, rotation_table
from fused_kv_llm.context_shift import ShiftFit, context_shift, place_weight, shift_name


def fitted(
    plain: tuple[torch.Tensor, torch.Tensor],
    seen: Sequence[tuple[tuple[torch.Tensor, torch.Tensor], float]],
) -> tuple[torch.Tensor, torch.Tensor]:
    fit = ShiftFit(*plain)
    for (keys, values), weight in seen:
        fit.add(keys, values, weight)
    return fit.shift()


def chunk() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 5, 8), torch.randn(2, 3, 5, 8)


@settings(max_examples=30)
@given(tokens=st.integers(1, 40), size=st.floats(1e-6, 1e4), seed=st.integers(0, 99))
def test_the_difference_is_kept_to_half_a_step(tokens: int, size: float, seed: int) -> None:
    torch.manual_seed(seed)
    change = size * torch.randn(2, 3, tokens, 8)
    side = context_shift(change, -change)
    for name, want in (("keys", change), ("values", -change)):
        step = want.abs().amax(-1, keepdim=True) / 127
        assert bool(((side[name] * side[f"{name}_scale"] - want).abs() <= 0.501 * step).all())


def test_no_difference_stays_none() -> None:
    same = chunk()
    side = context_shift(*fitted(same, [(same, 0.5), (same, 0.9)]))
    assert not side["keys"].any()
    assert not side["values"].any()


@given(seed=st.integers(0, 99), weights=st.lists(st.floats(0.2, 0.99), max_size=4))
def test_a_fit_is_compressed_as_its_shift_is(seed: int, weights: list[float]) -> None:
    torch.manual_seed(seed)
    fit = ShiftFit(*chunk())
    for weight in weights:
        fit.add(*chunk(), weight)
    got, want = fit.compressed(), context_shift(*fit.shift())
    for name in ("keys", "values"):
        torch.testing.assert_close(got[f"{name}_scale"], want[f"{name}_scale"])
        assert int((got[name].int() - want[name].int()).abs().max()) <= 1, "one where the quotient is half way"


@given(seed=st.integers(0, 99), weights=st.lists(st.floats(0.2, 0.99), min_size=1, max_size=4))
def test_the_shift_is_the_least_squares_fit_with_a_prior(seed: int, weights: list[float]) -> None:
    """As many rows as places, and one more that says that nothing changes."""
    torch.manual_seed(seed)
    plain, *forms = (chunk() for _ in range(1 + len(weights)))
    rows = torch.tensor([*weights, 0.15**0.5])[:, None]
    for index, shift in enumerate(fitted(plain, list(zip(forms, weights, strict=True)))):
        changes = torch.stack([*(form[index] - plain[index] for form in forms), torch.zeros_like(plain[index])])
        want = torch.linalg.lstsq(rows, changes.flatten(1)).solution.view_as(shift)
        torch.testing.assert_close(shift, want, atol=1e-4, rtol=1e-4)


def test_a_place_without_weight_says_nothing() -> None:
    plain, one, other = (chunk() for _ in range(3))
    both, alone = fitted(plain, [(one, 0.8), (other, 0.0)]), fitted(plain, [(one, 0.8)])
    assert all(torch.equal(with_it, without) for with_it, without in zip(both, alone, strict=True))


def test_small_changes_of_large_bfloat16_numbers_are_not_rounded() -> None:
    plain = tuple(256 * torch.ones(1, 1, 2, 2, dtype=torch.bfloat16) for _ in range(2))
    after = tuple(part.new_full(part.shape, 2.015625) for part in plain)
    keys, _ = fitted((plain[0], plain[1]), [((after[0], after[1]), 1.0)])
    torch.testing.assert_close(keys, torch.full_like(keys, (2.015625 - 256) / 1.15))


def test_keys_that_stand_elsewhere_are_moved_first() -> None:
    plain, one = chunk(), chunk()
    table = rotation_table(torch.tensor([77]), 1.0 / 100.0 ** (torch.arange(0, 8, 2) / 8))
    fit = ShiftFit(*plain)
    fit.add(*one, 0.8, [table] * 2)
    got = fit.shift()
    want = fitted(plain, [((rerotate_keys(one[0], table), one[1]), 0.8)])
    for part, other in zip(got, want, strict=True):
        torch.testing.assert_close(part, other)


def test_the_first_place_gets_nothing_and_later_ones_more() -> None:
    assert place_weight(0, 100) == 0.0
    assert place_weight(100, 100) == 0.5
    weights = [place_weight(before, 80) for before in range(0, 4000, 40)]
    assert weights == sorted(weights)
    assert weights[-1] < 1.0


def test_shifts_that_are_made_in_another_way_have_another_name() -> None:
    """Those of the earlier way with one prompt among them."""
    names = [shift_name(9, prompts) for prompts in (1, 2, 4)]
    assert len({*names, "shift-int8-1-prompts-9-pull-15"}) == 4
    assert shift_name(8, 2) != shift_name(9, 2)
