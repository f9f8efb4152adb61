"""The engine behind a framework's model object, and the bookkeeping of its requests."""

from __future__ import annotations

import warnings
import weakref
from threading import Lock, Thread
from typing import Any

from fused_kv_llm.config import EngineConfig
from fused_kv_llm.engine import FusedKVEngine
from fused_kv_llm.errors import FusedKVWarning
from fused_kv_llm.report import FusionReport

from .progress import count_answer
from .retrieval_log import RetrievalCheck, RetrievalLog
from .sharing import EngineLease

__all__ = ["Runtime"]


class Runtime:
    """A leased engine and the state that a model shares with the copies that frameworks make of it; thread-safe.

    The lease ends with :meth:`close`, or when this object is collected.

    Parameters
    ----------
    lease : EngineLease
    config : EngineConfig
        The options with which the model got its engine; those of the engine cannot change any more.

    Attributes
    ----------
    retrievals : RetrievalLog
        Texts that retrievers have returned.
    last_report : FusionReport or None
        Report of the request that ended last.
    """

    def __init__(self, lease: EngineLease, config: EngineConfig) -> None:
        self.engine: FusedKVEngine = lease.engine
        self.config = config
        self.retrievals = RetrievalLog()
        self.last_report: FusionReport | None = None
        self._warned = False
        self._lock = Lock()
        self._lease = lease
        if lease.shared:
            # In a thread, because the collector may run anywhere, also while that lock or the store's are held.
            weakref.finalize(self, lambda: Thread(target=lease.release).start()).atexit = False

    def close(self) -> None:
        """End the lease."""
        self._lease.release()

    def give_up(self) -> None:
        """End the lease of a model that was refused; an engine that the caller made stays the caller's, and open."""
        if self._lease.shared:
            self._lease.release()

    def check_retrievals(self, prompt: str) -> RetrievalCheck:
        """Look for retrieved texts in a prompt; warn the first time that the prompt contains none of them.

        Warns
        -----
        FusedKVWarning
            Once in the life of this object.
        """
        check = self.retrievals.check(prompt)
        if check.explanation is None:
            return check
        with self._lock:
            first, self._warned = not self._warned, True
        if first:
            warnings.warn(
                f"None of the {len(check.unmatched)} texts that were just retrieved is in the prompt "
                f"verbatim (the first begins {check.unmatched[0]!r}), so their stored KV cannot be reused "
                f"and the prompt is prefilled in full: {check.explanation}. "
                "This warning is given once per LLM.",
                FusedKVWarning,
                stacklevel=2,
            )
        return check

    def finish(self, reason: str | None, report: FusionReport, check: RetrievalCheck) -> dict[str, Any]:
        """Complete a request's report and return what frameworks attach to an answer.

        Parameters
        ----------
        reason : str or None
            Why the answer ended.
        report : FusionReport
            Texts that were not found are added to it, and scores to its verdicts.
        check : RetrievalCheck

        Returns
        -------
        dict
            finish_reason, fused_kv (the report as plain data), token_usage.
        """
        report.unmatched.extend(check.unmatched)
        report.verdicts = check.scored(report.verdicts)
        if check.explanation is not None:
            report.warnings.append(f"no retrieved text is in the prompt: {check.explanation}")
        self.last_report = report
        count_answer()
        return {
            "finish_reason": reason,
            "fused_kv": report.to_dict(),
            "token_usage": {
                "prompt_tokens": report.prompt_tokens,
                "completion_tokens": report.completion_tokens,
                "total_tokens": report.prompt_tokens + report.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": report.cached_tokens},
            },
        }
