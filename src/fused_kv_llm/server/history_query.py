"""Which requests of the request log are listed: the query of ``/v1/requests``, and its condition in SQL."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field

from fused_kv_llm.report import Outcome

__all__ = ["HistoryQuery"]


class HistoryQuery(BaseModel):
    """How many requests are listed, from behind the one with the id `before` on, and which; None takes all."""

    limit: int = Field(50, ge=1, le=200)
    before: str | None = Field(None, max_length=64)
    selector: str | None = Field(None, max_length=64)
    status: Literal["ok", "cancelled", "refused", "failed"] | None = None
    verdict: Outcome | None = None
    min_reused: float | None = Field(None, ge=0, le=1)
    since_s: float | None = Field(None, allow_inf_nan=False)
    until_s: float | None = Field(None, allow_inf_nan=False)

    def conditions(self) -> tuple[str, list[Any]]:
        """Return what to append to a condition of SQL for which requests are listed, and its values."""
        path = None if self.verdict is None else f'$."{self.verdict.value}"'
        found = (
            ("selector = ?", self.selector),
            ("status = ?", self.status),
            ("json_extract(verdicts, ?) > 0", path),
            ("reused_tokens >= ? * prompt_tokens", self.min_reused),
            ("created_s >= ?", self.since_s),
            ("created_s <= ?", self.until_s),
        )
        wanted = [(condition, value) for condition, value in found if value is not None]
        return "".join(f" AND {condition}" for condition, _ in wanted), [value for _, value in wanted]
