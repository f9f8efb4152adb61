"""The context shift: eight bits a number, and how much of it a place gets."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.context_shift import context_shift, mean_shift, place_weight


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
    side = context_shift(*mean_shift(same, [same, same]))
    assert not side["keys"].any()
    assert not side["values"].any()


def test_several_contexts_are_averaged() -> None:
    plain, *forms = (chunk() for _ in range(4))
    for index, mean in enumerate(mean_shift(plain, forms)):
        want = torch.stack([form[index] for form in forms]).mean(0) - plain[index]
        torch.testing.assert_close(mean, want)


def test_the_first_place_gets_nothing_and_later_ones_more() -> None:
    assert place_weight(0, 100) == 0.0
    assert place_weight(100, 100) == 0.5
    weights = [place_weight(before, 80) for before in range(0, 4000, 40)]
    assert weights == sorted(weights)
    assert weights[-1] < 1.0
