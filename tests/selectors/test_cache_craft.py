"""Cache fix overhead against the paper's equations 3 to 14, transcribed with plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fused_kv_llm.errors import FusedKVError
from fused_kv_llm.selectors import CacheCraft, Probe, cache_context_impact, fix_overhead, plain_overhead
from fused_kv_llm.selectors.cache_craft import adjusted_overlap

_NAMES = "abcdefgh"
_WEIGHTS = st.floats(0.001, 50.0)


def _beta_prime(inter: dict[str, float], old: list[str], new: list[str]) -> float:
    """Return equation 8, from equations 6 and 7 as the paper prints them."""
    shared = set(old) & set(new)
    beta = sum(inter[j] for j in shared) / sum(inter[j] for j in old)
    a_old, a_new = [j for j in old if j in shared], [j for j in new if j in shared]
    m, discordant = len(shared), 0
    for x in range(m):
        for y in range(x + 1, m):
            # A pair that stands in one order before and in the other now.
            discordant += a_new.index(a_old[x]) > a_new.index(a_old[y])
    gamma = discordant / (m * (m - 1) / 2) if m >= 2 else 0.0
    return beta * (1 - gamma)


@st.composite
def _prefixes(draw: st.DrawFn) -> tuple[list[str], list[str], list[float]]:
    old = draw(st.lists(st.sampled_from(_NAMES), min_size=1, max_size=6, unique=True))
    new = draw(st.lists(st.sampled_from(_NAMES), max_size=6, unique=True))
    return old, new, draw(st.lists(_WEIGHTS, min_size=len(old), max_size=len(old)))


@settings(max_examples=200)
@given(case=_prefixes())
def test_adjusted_overlap_is_equations_6_to_8(case: tuple[list[str], list[str], list[float]]) -> None:
    old, new, inter = case
    want = _beta_prime(dict(zip(old, inter, strict=True)), old, new)
    assert adjusted_overlap(inter, old, new) == pytest.approx(want)
    assert adjusted_overlap(inter, old, old) == pytest.approx(1.0)


@settings(max_examples=100)
@given(data=st.data(), case=_prefixes(), alpha=st.floats(0.1, 3.0))
def test_overhead_is_equations_9_to_12(
    data: st.DataObject, case: tuple[list[str], list[str], list[float]], alpha: float
) -> None:
    old, new, _ = case
    layers, own = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 40))
    sizes = data.draw(st.lists(st.integers(1, 50), min_size=len(old), max_size=len(old)))
    inter = [[data.draw(_WEIGHTS) for _ in old] for _ in range(layers)]
    intra = [data.draw(st.floats(0.5, 50.0)) for _ in range(layers)]
    a = sum(sum(i / (own * size) for i, size in zip(row, sizes, strict=True)) for row in inter) / layers
    b = sum(value / own**2 for value in intra) / layers
    cci = 1 / (1 + math.exp(-a / b))
    got = cache_context_impact(torch.tensor(inter), torch.tensor(intra), sizes, own)
    assert got == pytest.approx(cci, rel=1e-5)
    mean = [sum(row[j] for row in inter) / layers for j in range(len(old))]
    want = alpha * cci * (1 - _beta_prime(dict(zip(old, mean, strict=True)), old, new))
    assert fix_overhead(got, mean, old, new, alpha) == pytest.approx(min(1.0, want), rel=1e-5, abs=1e-9)


def test_overhead_at_the_edges() -> None:
    assert cache_context_impact(torch.zeros(2, 3), torch.ones(2), [4, 4, 4], 5) == 0.5
    assert cache_context_impact(torch.ones(2, 1), torch.zeros(2), [4], 1) == 1.0
    assert plain_overhead(is_first=True, alpha=3.0) == 0.0
    assert plain_overhead(is_first=False) == 0.5
    assert plain_overhead(is_first=False, alpha=3.0) == 1.0


def _probe(overhead: list[float], sizes: list[int], recorded: torch.Tensor) -> Probe:
    chunk = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    positions = 7 + torch.arange(sum(sizes)) + 2 * chunk
    return Probe(positions, chunk, positions, overhead=torch.tensor(overhead, dtype=torch.float64), recorded=recorded)


@settings(max_examples=100)
@given(data=st.data(), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5))
def test_selection_is_equation_14(data: st.DataObject, sizes: list[int]) -> None:
    overhead = [data.draw(st.integers(0, 20)) / 20 for _ in sizes]
    recorded = torch.tensor(data.draw(st.permutations(range(sum(sizes)))), dtype=torch.float32)
    probe = _probe(overhead, sizes, recorded)
    want: list[int] = []
    for chunk, (cfo, size) in enumerate(zip(overhead, sizes, strict=True)):
        mine = [t for t in range(sum(sizes)) if int(probe.chunk_index[t]) == chunk]
        # In whole numbers: the overheads are twentieths.
        count = -(-round(cfo * 20) * size // 20)
        want += sorted(mine, key=lambda t: -float(recorded[t]))[:count]
    got = CacheCraft().select(probe, sum(sizes))
    assert got.tolist() == sorted(int(probe.positions[t]) for t in want)
    budget = data.draw(st.integers(0, sum(sizes)))
    assert CacheCraft().select(probe, budget).shape[0] == min(budget, len(want))


def test_a_probe_without_records_is_refused() -> None:
    probe = _probe([0.5], [4], torch.zeros(4))
    with pytest.raises(FusedKVError, match="overheads"):
        CacheCraft().select(Probe(probe.positions, probe.chunk_index, probe.offset), 2)
