"""CacheBlend's deviation and choice (FusionRAG equations 7 and 8), by hand on three tokens of two heads."""

from __future__ import annotations

import math

import pytest
import torch

from fused_kv_kernels import kv_deviation
from fused_kv_llm.selectors import Probe, resolve_selector


def _probe(deviation: list[float], received: list[float]) -> Probe:
    positions = torch.arange(5, 5 + len(deviation))
    return Probe(
        positions, torch.zeros_like(positions), positions - 5,
        deviation=torch.tensor(deviation), received=torch.tensor(received),
    )  # fmt: skip


def test_deviation_is_the_distance_over_keys_values_and_heads() -> None:
    stored_k, stored_v = torch.zeros(2, 3, 2), torch.zeros(2, 3, 2)
    fresh_k, fresh_v = stored_k.clone(), stored_v.clone()
    fresh_k[0, 0] = torch.tensor([3.0, 0.0])
    fresh_v[1, 0] = torch.tensor([0.0, 4.0])
    fresh_k[1, 2] = torch.tensor([1.0, 2.0])
    fresh_v[0, 2] = torch.tensor([2.0, 4.0])
    rows = torch.arange(3)
    got = kv_deviation(fresh_k, fresh_v, stored_k, stored_v, rows, rows)
    assert got.tolist() == pytest.approx([math.sqrt(3**2 + 4**2), 0.0, math.sqrt(1 + 4 + 4 + 16)])


@pytest.mark.parametrize("name", ["cacheblend", "cacheblend_released"])
def test_the_tokens_that_deviate_most_are_taken(name: str) -> None:
    """Equation 8: Top-k of the deviation."""
    probe = _probe([0.5, 2.0, 1.0, 3.0], [1.0, 1.0, 1.0, 1.0])
    assert resolve_selector(name).select(probe, 2).tolist() == [6, 8]


def test_one_compares_layer_by_layer_and_the_other_once() -> None:
    gradual, once = (resolve_selector(name).view(12) for name in ("cacheblend", "cacheblend_released"))
    assert (gradual.deviation, gradual.keep) == ((1, 2, 3), (1.5, 1.25, 1.0))  # type: ignore[union-attr]
    assert (once.deviation, once.keep) == ((1,), (1.0,))  # type: ignore[union-attr]


def test_kvshare_scales_the_deviation_by_the_attention_received() -> None:
    probe = _probe([0.5, 2.0, 1.0, 3.0], [8.0, 1.0, 5.0, 0.5])
    # 4.0, 2.0, 5.0 and 1.5.
    assert resolve_selector("kvshare").select(probe, 2).tolist() == [5, 7]
