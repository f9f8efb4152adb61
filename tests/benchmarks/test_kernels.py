"""The kernels' benchmark measures what it says, on sizes that take no time."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
import ttft_gpu
from kernel_cases import clock, rows
from kernel_cases.others import measure_others
from kernel_cases.rows import RowCase, measure_rows

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("rows", "others"):
        monkeypatch.setattr(f"kernel_cases.{module}.median_s", clock.once_s)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
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
    assert all(r["host_s"] > 0 for r in records)
    assert len({r["operator"] for r in records}) == 6


def test_a_contestant_that_fails_says_so_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA with a mask is the faster of two ways; what writes all scores may not fit into memory."""
    real = rows.sdpa

    def grouped_with_a_mask_does_not_fit(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("enable_gqa") and "attn_mask" in kwargs:
            raise torch.OutOfMemoryError("tried to allocate too much\nand more")
        return real(*args, **kwargs)

    def not_supported(*_: Any, **__: Any) -> None:
        raise ValueError("no such heads")

    monkeypatch.setattr(rows, "sdpa", grouped_with_a_mask_does_not_fit)
    monkeypatch.setattr(rows, "flex_attention", not_supported)
    case = RowCase(batch=1, keys=96, ratio=0.2, q_heads=4, kv_heads=2, dim=16)
    records = {r["what"]: r for r in measure_rows(case, CPU, torch.float32)}
    assert records["SDPA, mask"]["seconds"] > 0
    assert records["FlexAttention"]["failed"] == "ValueError: no such heads"
    assert "seconds" not in records["FlexAttention"]
    assert records["reference"]["seconds"] > 0
    ceilings = clock.Ceilings(1e12, 1e11)
    shared = kernels.with_shares([{**r} for r in records.values()], ceilings)
    assert [r["what"] for r in shared if "times_ours" not in r] == ["FlexAttention"]


def test_what_was_measured_before_a_failure_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    def case() -> Iterator[dict[str, Any]]:
        yield {"what": "first"}
        raise RuntimeError("the device is gone")

    assert kernels._all_of(case) == [{"what": "first"}, {"failed": "RuntimeError: the device is gone"}]
    assert "the device is gone" in capsys.readouterr().err


def test_what_is_not_begun_in_time_is_a_failure() -> None:
    args = argparse.Namespace(minutes=0.0, batches=[1], contexts=[64])
    (records,) = kernels.measure(args, CPU, torch.float32)
    assert {r["failed"] for r in records} == {"not begun within 0 minutes"}
    assert kernels.with_shares(records, clock.Ceilings(1.0, 1.0)) == records


def test_lengths_that_fail_or_come_too_late_are_told(tmp_path: Path) -> None:
    class Engine:
        def build_kv_cache(self, chunks: list[str], *, preprocess: str) -> None:
            raise RuntimeError("no room")

    result: dict[str, Any] = {"rows": [], "decoding": [], "failed": []}
    args = argparse.Namespace(minutes=1.0, lengths=[1024], words=10, out=tmp_path / "found")
    ttft_gpu.measure_lengths(Engine(), tmp_path, args, result)  # type: ignore[arg-type]
    args.minutes = 0.0
    ttft_gpu.measure_lengths(Engine(), tmp_path, args, result)  # type: ignore[arg-type]
    assert result["failed"] == ["1024 tokens: RuntimeError: no room", "1024 tokens: not begun within 0 minutes"]
    assert "no room" in (tmp_path / "found.json").read_text()
