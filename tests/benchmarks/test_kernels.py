"""The kernels' benchmark measures what it says, on sizes that take no time."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import clock
from kernel_cases.others import measure_others
from kernel_cases.rows import RowCase, measure_rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rows", "others"):
        monkeypatch.setattr(f"kernel_cases.{module}.median_s", clock.once_s)


def test_rows_are_compared_with_everything_and_with_the_truth() -> None:
    case = RowCase(batch=1, keys=96, ratio=0.2, q_heads=4, kv_heads=2, dim=16)
    records = {r["what"]: r for r in measure_rows(case, CPU, torch.float32)}
    assert list(records) == ["row attention", "SDPA flash, all rows", "SDPA, mask", "FlexAttention", "reference"]
    assert records["row attention"]["error"] < 1e-5
    assert records["FlexAttention"]["mask_s"] > 0
    assert records["row attention"]["rows"] == 19


def test_operations_are_those_that_are_seen() -> None:
    case = RowCase(batch=2, keys=10, ratio=1.0, q_heads=4, kv_heads=2, dim=16)
    assert case.positions(CPU).tolist() == list(range(10))
    assert case.flops(case.positions(CPU)) == 2 * 4 * 55 * (2 * 2 * 16)


def test_others_come_in_pairs() -> None:
    records = list(measure_others(1024, 1, CPU, torch.float32))
    assert len(records) == 12
    assert all(r["seconds"] > 0 and r["bytes_per_s"] > 0 for r in records)
    assert len({r["operator"] for r in records}) == 6
