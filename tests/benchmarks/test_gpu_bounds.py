"""What counts as holding, and that nothing holds which was not measured."""

from __future__ import annotations

import gpu_bounds


def _records(flash: float, placed: float) -> list[dict[str, object]]:
    sizes = {"keys": 32768, "batch": 1}
    return [
        {"what": "SDPA flash, all rows", **sizes, "ratio": 0.15, "times_ours": flash},
        {"what": "SDPA flash, all rows", **sizes, "ratio": 1.0, "times_ours": 0.9},
        {"what": "SDPA, mask", **sizes, "ratio": 0.15, "times_ours": 4.5},
        {"what": "row attention", **sizes, "ratio": 0.15, "times_ours": 1.0, "error": 3e-3},
        {"what": "chunk placement", **sizes, "ratio": None, "share_of_bandwidth": placed},
        {"what": "chunk placement from int8", **sizes, "ratio": None, "share_of_bandwidth": 0.9},
    ]


TTFT = [
    {"what": "fused 0.15, pinned memory", "prompt_tokens": 32900, "times_sooner": 5.0},
    {"what": "fused 0, pinned memory", "prompt_tokens": 16500, "times_sooner": 20.0},
    {"what": "fused 0, pinned memory", "prompt_tokens": 32900, "times_sooner": 11.0},
]


def test_bounds_are_compared_at_their_size() -> None:
    checked = gpu_bounds.check(_records(flash=5.5, placed=0.69), TTFT)
    assert [row["holds"] for row in checked] == [True, True, True, True, False, True, True, False]
    assert not gpu_bounds.check(_records(flash=5.2, placed=0.8), TTFT)[0]["holds"]


def test_nothing_holds_that_was_not_measured() -> None:
    checked = gpu_bounds.check([], [])
    assert {row["found"] for row in checked} == {None}
    assert not any(row["holds"] for row in checked)
