"""The CPU kernels' benchmark: its bounds, and results that are kept beside new ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import kernels_cpu
import pytest
import torch


def _record(
    dtype: str, heads: tuple[int, int, int], keys: int, ratio: float, share: float, mask: float
) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "heads": list(heads),
        "keys": keys,
        "ratio": ratio,
        "seconds": {},
        "times_share_of_causal": {"torch": share},
        "times_mask": {"torch": mask},
    }


def test_each_kind_of_heads_has_its_own_bounds() -> None:
    records = [
        _record("float32", (9, 3, 64), 4096, 0.15, share=1.2, mask=0.5),
        _record("float32", (9, 3, 64), 1024, 0.05, share=3.0, mask=1.1),
        _record("float32", (9, 9, 64), 4096, 0.15, share=1.4, mask=0.5),
    ]
    found = [(b["heads"], b["found"], b["holds"]) for b in kernels_cpu.bounds(records)]
    assert found == [
        ((9, 3, 64), 1.2, True),
        ((9, 3, 64), 1.1, False),
        ((9, 9, 64), 1.4, False),
        ((9, 9, 64), 0.5, True),
    ]


def test_results_of_other_heads_and_dtypes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    old = [_record("float32", (9, 3, 64), 4096, 0.15, 1.0, 1.0), _record("float32", (9, 9, 64), 4096, 0.15, 1.0, 1.0)]
    assert kernels_cpu.earlier(path, old) == {"commands": [], "records": []}
    path.write_text(json.dumps({"commands": ["first"], "records": old}))
    new = [_record("float32", (9, 9, 64), 1024, 0.15, 2.0, 2.0)]
    assert kernels_cpu.earlier(path, new) == {"commands": ["first"], "records": old[:1]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_contestants_compute_the_same_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSED_KV_KERNELS", "auto")  # the contestants set it: afterwards it is as it was
    runs = kernels_cpu.contestants(96, 0.25, (6, 2, 16), dtype)
    outputs = {name: run().float() for name, run in runs.items()}
    assert outputs.pop("causal").shape == (1, 6, 96, 16)
    for out in outputs.values():
        torch.testing.assert_close(out, outputs["mask"], atol=2e-2, rtol=2e-2)
