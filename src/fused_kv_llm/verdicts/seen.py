"""What became of the chunks that were found in a prompt, as far as its plan tells."""

from __future__ import annotations

from collections.abc import Iterable

from fused_kv_llm.report import FusionReport, Outcome, Verdict

from .remedies import verdict_of

__all__ = ["SeenChunks"]

_FAILED = (Outcome.DAMAGED, Outcome.NOT_LOADED, Outcome.EVICTED, Outcome.DELETED)


class SeenChunks:
    """Collects what a plan does with each chunk; for one plan.

    Parameters
    ----------
    report : FusionReport
        Gets the verdicts.
    """

    def __init__(self, report: FusionReport) -> None:
        self._report = report
        self._tokens: dict[str, int] = {}
        self._failed: dict[str, Verdict] = {}
        self._texts: dict[str, str] = {}

    def reused(self, key: str, text: str, tokens: int) -> None:
        """Note tokens of the prompt for which a chunk's KV is at hand."""
        self._texts[key] = text
        self._tokens[key] = self._tokens.get(key, 0) + tokens

    def failed(self, key: str, text: str, outcome: Outcome, detail: str) -> None:
        """Note why a chunk that was found is computed; what is reused of it at another place counts more."""
        self._texts[key] = text
        self._failed[key] = verdict_of(text, outcome, detail, key)

    def finish(self) -> dict[str, Verdict]:
        """Put the verdicts into the report, beside what became of chunks in earlier plans; return them by text."""
        outcome = Outcome.RECOMPUTED if self._report.recompute_ratio >= 1 else Outcome.REUSED
        seen = {}
        for key, text in self._texts.items():
            tokens = self._tokens.get(key, 0)
            if tokens or key not in self._failed:
                seen[text] = verdict_of(text, outcome, "", key, tokens=tokens)
            else:
                seen[text] = self._failed[key]
        self._report.verdicts = [*_earlier(self._report.verdicts, self._texts), *seen.values()]
        return seen


def _earlier(verdicts: Iterable[Verdict], keys: Iterable[str]) -> list[Verdict]:
    known = set(keys)
    return [one for one in verdicts if one.outcome in _FAILED and one.chunk_id not in known]
