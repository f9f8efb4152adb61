"""Token scores against their reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerance import TOLERANCE, assert_near

from fused_kv_kernels import token_scores
from fused_kv_kernels.reference import token_scores_reference
from fused_kv_kernels.scoring import Scoring


@settings(max_examples=40)
@given(num_keys=st.integers(1, 120), data=st.data(), groups=st.sampled_from([1, 3]))
def test_equals_reference(num_keys: int, data: st.DataObject, groups: int) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1, max_size=20)))
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(2 * groups, len(rows), 16, generator=generator)
    k = torch.randn(2, num_keys, 16, generator=generator)
    positions = torch.tensor(rows)
    got = token_scores(q, k, positions, 0.25)
    torch.testing.assert_close(got, token_scores_reference(q, k, positions, 0.25), atol=1e-6, rtol=1e-5)
    assert got.sum().item() == pytest.approx(1.0, abs=1e-5)


@settings(max_examples=40)
@given(
    num_keys=st.integers(1, 400),
    data=st.data(),
    groups=st.sampled_from([1, 3, 7]),
    dim=st.sampled_from([16, 64, 80, 128]),
)
def test_bfloat16_equals_reference(num_keys: int, data: st.DataObject, groups: int, dim: int) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, num_keys - 1), min_size=1, max_size=20)))
    generator = torch.Generator().manual_seed(num_keys)
    q = torch.randn(len(rows), 2 * groups, dim, generator=generator).bfloat16().transpose(0, 1)
    k = torch.randn(2, num_keys + 5, dim, generator=generator).bfloat16()[:, :num_keys]
    positions = torch.tensor(rows)
    got = token_scores(q, k, positions, dim**-0.5)
    want = token_scores_reference(q.float(), k.float(), positions, dim**-0.5)
    assert_near(got * num_keys, want * num_keys, torch.bfloat16)
    assert got.sum().item() == pytest.approx(1.0, abs=1e-3)
    assert torch.equal(got, token_scores(q, k, positions, dim**-0.5))


def test_a_token_that_the_question_looks_for_wins() -> None:
    k = torch.nn.functional.normalize(torch.randn(1, 50, 32, generator=torch.Generator().manual_seed(0)), dim=-1)
    q = 20 * k[:, 17:18].expand(4, 3, 32)
    scores = token_scores(q, k, torch.tensor([47, 48, 49]), 1.0)
    assert int(scores.argmax()) == 17


def test_future_keys_score_nothing() -> None:
    q, k = torch.randn(2, 1, 8), torch.randn(1, 10, 8)
    scores = token_scores(q, k, torch.tensor([4]), 1.0)
    assert torch.equal(scores[5:], torch.zeros(5))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "dim", "keys", "rows"),
    [(4, 2, 64, 100, [99]), (7, 1, 128, 90, [3, 80, 81]), (3, 3, 80, 33, [0, 31, 32]), (16, 1, 16, 64, range(64))],
    ids=["one_row", "gqa_7", "dim_80", "all_rows"],
)
def test_triton_equals_reference(
    q_heads: int, kv_heads: int, dim: int, keys: int, rows: list[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Over two layers. Scores are shares of one: they are compared after scaling to their mean."""
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(2, q_heads, len(rows), dim, generator=generator).to(device, dtype)
    k = torch.randn(2, kv_heads, keys, dim, generator=generator).to(device, dtype)
    positions = torch.tensor(rows, device=device)[:, None].repeat(1, 2)[:, 0]
    got = token_scores(q, k, positions, dim**-0.5)
    layers = [token_scores_reference(a.float(), b.float(), positions, dim**-0.5) for a, b in zip(q, k, strict=True)]
    assert_near(got * keys, torch.stack(layers).mean(0) * keys, dtype)
    assert_near(token_scores(q[0], k[0], positions, dim**-0.5) * keys, layers[0] * keys, dtype)


@pytest.mark.parametrize("splits", [2, 7])
def test_splitting_the_first_pass_changes_nothing(splits: int, device: torch.device) -> None:
    from fused_kv_kernels.triton_ops import token_scores as in_triton

    q, k = torch.randn(1, 2, 3, 64, device=device), torch.randn(1, 1, 150, 64, device=device)
    positions = torch.tensor([140, 2, 70], device=device)
    got = in_triton.token_scores(q, k, positions, Scoring(0.125), splits=splits)
    assert_near(got * 150, token_scores_reference(q[0], k[0], positions, 0.125) * 150, torch.float32)
