"""Equation 16 against a simulation of layers that are loaded beside layers that are computed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_kv_llm.online import MovingAverage, loading_depth

LAYERS = st.integers(1, 60)
SECONDS = st.integers(1, 1000).map(lambda number: number / 64)


def simulate(num_layers: int, load_s: float, compute_s: float, depth: int) -> tuple[float, float]:
    """Return when the last layer is computed, and how long layers waited once the first had begun, in seconds."""
    now_s = started_s = depth * load_s
    waited_s = 0.0
    for layer in range(num_layers):
        there_s = (layer + 1) * load_s
        waited_s += max(0.0, there_s - now_s)
        now_s = max(now_s, there_s) + compute_s
    assert now_s >= started_s
    return now_s, waited_s


@given(num_layers=LAYERS, load_s=SECONDS, compute_s=SECONDS)
def test_it_is_the_least_depth_at_which_no_layer_waits(num_layers: int, load_s: float, compute_s: float) -> None:
    depth = loading_depth(num_layers, load_s, compute_s)
    smooth = [d for d in range(1, num_layers + 1) if simulate(num_layers, load_s, compute_s, d)[1] < 1e-9]
    assert depth == smooth[0]


@given(num_layers=LAYERS, load_s=SECONDS, compute_s=SECONDS)
def test_no_other_depth_ends_sooner(num_layers: int, load_s: float, compute_s: float) -> None:
    ends = [simulate(num_layers, load_s, compute_s, depth)[0] for depth in range(1, num_layers + 1)]
    # Rounded up to whole layers.
    assert ends[loading_depth(num_layers, load_s, compute_s) - 1] <= min(ends) + load_s + 1e-9


@given(num_layers=LAYERS, slow=SECONDS, fast=SECONDS, compute_s=SECONDS)
def test_slower_loading_never_needs_less(num_layers: int, slow: float, fast: float, compute_s: float) -> None:
    fast, slow = sorted((fast, slow))
    depths = [loading_depth(num_layers, seconds, compute_s) for seconds in (0.0, fast, slow)]
    assert depths == sorted(depths)
    assert depths[0] == 1
    assert loading_depth(num_layers, fast, compute_s) >= loading_depth(num_layers, fast, slow + compute_s)


def test_the_papers_example_and_the_ends() -> None:
    assert loading_depth(5, 2.0, 1.0) == 3  # figure 19
    assert loading_depth(30, 1.0, 0.0) == 30
    assert loading_depth(30, 1.0, float("inf")) == 1
    assert loading_depth(1, 5.0, 1.0) == 1


def test_newer_values_count_more() -> None:
    average = MovingAverage()
    assert average.value is None
    for value in (1.0, 1.0, 2.0):
        average.add(value)
    assert average.value == pytest.approx(1.2)
