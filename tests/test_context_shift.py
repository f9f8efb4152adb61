"""The context shift: a product of rank 8 close to the best one, and how much of it a place gets."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_kernels.reference import rerotate_keys_reference
from fused_kv_llm.context_shift import context_shift, place_weight

INV_FREQ = torch.tensor([1.0, 0.1, 0.01, 0.001])


def compressed(change_k: torch.Tensor, change_v: torch.Tensor) -> dict[str, torch.Tensor]:
    plain = (torch.randn_like(change_k), torch.randn_like(change_v))
    return context_shift(plain, (plain[0] + change_k, plain[1] + change_v), INV_FREQ)


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 40), rank=st.integers(1, 8), seed=st.integers(0, 99))
def test_a_change_of_low_rank_is_kept(tokens: int, rank: int, seed: int) -> None:
    torch.manual_seed(seed)
    matrix = torch.randn(2, tokens, rank) @ torch.randn(2, rank, 24)
    change = matrix.view(2, tokens, 3, 8).transpose(1, 2)
    # What is common to keys is common where they all stand in one place.
    side = compressed(rerotate_keys_reference(change, torch.arange(tokens), INV_FREQ), change)
    for name in ("keys", "values"):
        left, right = side[f"{name}_left"], side[f"{name}_right"]
        assert left.shape[2] == right.shape[1] <= 8
        torch.testing.assert_close(left @ right, matrix, atol=1e-3, rtol=1e-3)


def test_of_any_change_the_product_is_nearly_the_best() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(2, 60, 40) @ torch.diag(0.8 ** torch.arange(40)) @ torch.randn(40, 40)
    change = matrix.view(2, 60, 5, 8).transpose(1, 2)
    side = compressed(change, change)
    error = torch.linalg.matrix_norm(matrix - side["values_left"] @ side["values_right"])
    best = torch.linalg.svdvals(matrix)[:, 8:].norm(dim=-1)
    assert bool((error < 1.05 * best).all())


def test_it_is_the_same_every_time_and_leaves_the_callers_draws_alone() -> None:
    torch.manual_seed(3)
    change = torch.randn(2, 3, 30, 8)
    plain = (torch.zeros_like(change), torch.zeros_like(change))
    state = torch.get_rng_state()
    first, second = (context_shift(plain, (change, change), INV_FREQ) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_place_gets_nothing_and_later_ones_more() -> None:
    assert place_weight(0, 100) == 0.0
    assert place_weight(100, 100) == 0.5
    weights = [place_weight(before, 80) for before in range(0, 4000, 40)]
    assert weights == sorted(weights)
    assert weights[-1] < 1.0
