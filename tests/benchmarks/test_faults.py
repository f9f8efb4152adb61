"""The benchmark of faults tells right answers from wrong ones and from errors."""

from __future__ import annotations

from dataclasses import replace

import faults

from fused_kv_llm.errors import StepFailedError
from fused_kv_llm.online import Generation, Piece
from fused_kv_llm.report import FusionReport
from fused_kv_llm.serving import RequestHandle

FOUND, MISSED = FusionReport(chunks_found=2), FusionReport(chunks_missed=2)
REUSED = Generation("", [1, 2], "length", FOUND)
FULL = Generation("", [1, 3], "length", FOUND)


def ended(report: FusionReport, *token_ids: int) -> RequestHandle:
    handle = RequestHandle(lambda: None, FusionReport())
    for token in token_ids[:-1]:
        handle.put(Piece("", token))
    handle.put(Piece("", token_ids[-1], "length", report))
    return handle


def failed(error: Exception) -> RequestHandle:
    handle = RequestHandle(lambda: None, FusionReport())
    handle.put(error)
    return handle


def test_an_answer_is_compared_with_what_was_found() -> None:
    some = replace(FOUND, chunks_missed=1)
    cases = [
        (ended(FOUND, 1, 2), "right"), (ended(FOUND, 1, 3), "wrong"), (ended(MISSED, 1, 3), "right"),
        (ended(MISSED, 1, 2), "wrong"), (ended(some, 1, 2), "some_chunks"),
        (failed(StepFailedError("three times")), "clear_errors"), (failed(KeyError("what")), "other_errors"),
    ]  # fmt: skip
    assert [faults.outcome(handle, REUSED, FULL)[0] for handle, _ in cases] == [want for _, want in cases]
