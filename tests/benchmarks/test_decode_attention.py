"""The decoding step's benchmark: both ways compute the same, and its bound is a share of a plain read."""

from __future__ import annotations

import decode_attention as benchmark
import pytest
import torch

SHAPE = benchmark.Shape(sequences=3, keys=20, layers=2, q_heads=4, kv_heads=2, dim=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_ways_compute_the_same(dtype: torch.dtype) -> None:
    runs = benchmark.contestants(SHAPE, dtype)
    torch.testing.assert_close(runs["together"](), runs["one_by_one"](), atol=2e-2, rtol=2e-2)


def test_what_a_step_reads_and_its_bound() -> None:
    assert SHAPE.nbytes(torch.bfloat16) == 3 * 2 * 2 * 20 * (16 + 16) * 2
    record = benchmark.measure(SHAPE, torch.float32, rounds=1)
    assert record["holds"] == (record["share_of_read"] >= benchmark.LEAST_SHARE_OF_READ)
    assert ("DOES NOT HOLD" in benchmark.describe(record)) != record["holds"]
