"""The benchmark of shared chunks: its bound is on the memory of a further request."""

from __future__ import annotations

import pytest
import shared_chunks as benchmark
import torch


@pytest.mark.parametrize("plain", [False, True])
def test_both_ways_run_and_memory_is_counted(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LAYERS", 2)
    found = benchmark.contest(2, torch.float32, plain)
    shared, private = found.runs["shared"](), found.runs["private"]()
    assert shared.shape == private.shape
    assert shared.isfinite().all()
    tokens = 2 * 3 * (64 + 64) * 4
    assert found.private_nbytes == (10 * 200 + 50 + 64) * tokens
    assert found.shared_nbytes == 2000 * (tokens + (0 if plain else tokens // 4 + 2 * 3 * 2 * 4))
    assert (10 * 30 + 50 + 64) * tokens < found.own_nbytes < 0.4 * found.private_nbytes
    record = benchmark.measure(2, torch.float32, plain, rounds=1)
    assert record["holds"] == ("DOES NOT HOLD" not in benchmark.describe(record))
    assert record["shared_nbytes"] == found.shared_nbytes + 2 * found.own_nbytes
