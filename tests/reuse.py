"""How much of what was retrieved came from stored KV."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from fused_kv_llm.adapter import FusedKVModel

RETRIEVED = 3
"""Documents that the chains of the tests retrieve for a question."""


class Requests:
    """Records the report of every request of an LLM, and the texts of every retrieval announced to it."""

    def __init__(self, llm: FusedKVModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = llm.engine
        self.reports: list[dict[str, Any]] = []
        self.retrieved: list[str] = []
        runtime = llm._runtime
        finish, add = runtime.finish, runtime.retrievals.add

        def finishing(reason: Any, report: Any, check: Any) -> dict[str, Any]:
            info = finish(reason, report, check)
            self.reports.append(info["fused_kv"])
            return info

        def adding(texts: Iterable[str], scores: Sequence[float | None] = ()) -> None:
            self.retrieved += (kept := list(texts))
            add(kept, scores)

        monkeypatch.setattr(runtime, "finish", finishing)
        monkeypatch.setattr(runtime.retrievals, "add", adding)

    def share(self, texts: Iterable[str] | None = None) -> float:
        """Return the tokens reused in all requests, of ratio 0, over those of the texts or of all retrieved ones."""
        assert {report["recompute_ratio"] for report in self.reports} == {0}
        reused = sum(report["reused_tokens"] for report in self.reports)
        wanted = self.retrieved if texts is None else texts
        return float(reused / sum(len(self.engine.token_ids(text.strip())) for text in wanted))

    def clear(self) -> None:
        """Forget everything recorded so far."""
        self.reports.clear()
        self.retrieved.clear()
