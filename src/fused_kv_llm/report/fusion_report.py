"""What one request reused, recomputed and waited for."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fused_kv_llm.report.html import report_to_html
from fused_kv_llm.report.page import report_page
from fused_kv_llm.report.timeline import StageTime, renamed, with_stage
from fused_kv_llm.report.trace import PromptTrace
from fused_kv_llm.report.verdict import Verdict

__all__ = ["FusionReport"]


@dataclass(slots=True)
class FusionReport:
    """What one request reused, recomputed and waited for.

    ``prompt_tokens = prefix_tokens + reused_tokens + recomputed_tokens + fresh_tokens``.

    Parameters
    ----------
    prompt_tokens : int
        Tokens of the prompt.
    prefix_tokens : int
        Leading tokens whose KV was at hand: the prompt's fixed header, and what earlier requests left of it.
    prefix_cache_tokens : int
        Those of them that are not the header's: they came from the prefix cache.
    reused_tokens : int
        Chunk tokens whose stored KV was used as it is.
    recomputed_tokens : int
        Chunk tokens that were recomputed although their KV is stored.
    fresh_tokens : int
        Tokens without stored KV: the question, separators, chunk edges, chunks that missed.
    completion_tokens : int
        Tokens generated.
    chunks_found, chunks_missed : int
        Chunks found in the prompt with usable KV, those inside the prefix among them, and found chunks whose KV could
        not be used.
    unmatched : list of str
        Beginnings of retrieved chunks that are not in the prompt verbatim.
    verdicts : list of Verdict
        What became of every chunk that was retrieved or expected, and otherwise of those that were found in the prompt.
    recompute_ratio : float
        The ratio asked for.
    selector : str
        The selector used.
    bytes_loaded : dict of str to int
        KV bytes by the tier they came from; a chunk that stands in the prompt twice counts once.
    sidecar_bytes_loaded : dict of str to int
        Bytes of the sidecars beside the chunks by what they hold, ``"context_shift"`` or ``"anchors"``, whichever
        tier they came from; each file counts once.
    selection_bytes : int
        Bytes of stored KV and sidecars that the selector had to see before recomputation could begin.
    expected_divergence : float or None
        An experimental estimate of how far the answer is from full prefill's, without a unit, see
        :func:`fused_kv_llm.online.divergence.expected_divergence`: it follows the true divergence only weakly. None
        where the selector does not look at the question's attention or transfers no deviation, or nothing was
        recomputed. With ``recompute_ratio="adaptive"`` it is another estimate, in nats, which follows the true one far
        better: the mean KL divergence that is expected along up to eight first tokens of the answer, see
        :func:`fused_kv_llm.online.adaptive.expected_after`.
    variants : list of dict
        With a selector that uses variants of chunks, one for each chunk: ``chunk``, the beginning of its key;
        ``variant``, the name of the one that was used, empty for plain KV; ``overhead``, its cache fix overhead; and
        ``recomputed_tokens``.
    own_kv_bytes, shared_kv_bytes : int
        Bytes of the KV that the request had for itself while its answer was written, with room for all of it, and of
        the chunks' pages that it shared with others; 0 if it had a copy of them.
    not_shared : str
        Why it had a copy, although it was to share; empty if it shared, or was not to.
    speculation : str
        How a request fared whose prompt was proposed while a search went on: ``"confirmed"``, the first proposal was
        right; ``"corrected"``, a later one was, perhaps that of the search's end; ``"wrong"``, none was; ``"off"``, the
        engine had other work. Empty without speculation.
    speculations_dropped : int
        Proposals that were given up.
    retries : int
        How often something of the request was computed again, since a step failed or the device's KV was lost.
    search_s, search_hidden_s : float
        Seconds of the search, and those of them in which this prompt was being loaded or computed already.
    seconds : dict of str to float
        Seconds by stage: queue, align, load, probe, select, fuse, decode, first_token, and step, the mean from token to
        token.
    read_s : float
        Seconds in which the prompt's passes waited for stored KV; ``seconds`` has them in ``probe`` and ``fuse``.
    timeline : list of StageTime
        When the stages began and ended; ``decode`` is from the first token to the last. Stages of one request may
        overlap: what is slow to read is loaded while it waits.
    called_s : float
        ``time.perf_counter()`` of the call, from which the timeline counts; not part of :meth:`to_dict`.
    ttft_s : float
        Seconds from the call to the first token.
    warnings : list of str
        What made the request slower than it could be.
    trace : PromptTrace or None
        The prompt's text and what became of each token; not part of :meth:`to_dict`.
    """

    prompt_tokens: int = 0
    prefix_tokens: int = 0
    prefix_cache_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    fresh_tokens: int = 0
    completion_tokens: int = 0
    chunks_found: int = 0
    chunks_missed: int = 0
    unmatched: list[str] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    recompute_ratio: float = 0.0
    selector: str = ""
    bytes_loaded: dict[str, int] = field(default_factory=dict)
    sidecar_bytes_loaded: dict[str, int] = field(default_factory=dict)
    selection_bytes: int = 0
    expected_divergence: float | None = None
    variants: list[dict[str, Any]] = field(default_factory=list)
    own_kv_bytes: int = 0
    shared_kv_bytes: int = 0
    not_shared: str = ""
    speculation: str = ""
    speculations_dropped: int = 0
    retries: int = 0
    search_s: float = 0.0
    search_hidden_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    read_s: float = 0.0
    timeline: list[StageTime] = field(default_factory=list)
    called_s: float = field(default_factory=time.perf_counter, repr=False, compare=False)
    ttft_s: float = 0.0
    warnings: list[str] = field(default_factory=list)
    trace: PromptTrace | None = field(default=None, repr=False, compare=False)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed: the prefix and the reused chunk tokens."""
        return self.prefix_tokens + self.reused_tokens

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that went through the model."""
        return self.recomputed_tokens + self.fresh_tokens

    def spend(self, stage: str, began_s: float, ended_s: float) -> None:
        """Add a stage, or a part of it.

        Parameters
        ----------
        stage : str
        began_s, ended_s : float
            By ``time.perf_counter()``.
        """
        self.seconds[stage] = self.seconds.get(stage, 0.0) + ended_s - began_s
        self.timeline = with_stage(self.timeline, self._from_call(stage, began_s, ended_s))

    def rename(self, old: str, stage: str, began_s: float, ended_s: float) -> None:
        """Say that a part of a stage was another one; otherwise as :meth:`spend`."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + ended_s - began_s
        self.seconds[old] -= ended_s - began_s
        self.timeline = renamed(self.timeline, old, self._from_call(stage, began_s, ended_s))

    def count_from(self, called_s: float) -> None:
        """Take another moment, by ``time.perf_counter()``, for the call."""
        later_s, self.called_s = called_s - self.called_s, called_s
        self.timeline = [StageTime(one.stage, one.start_s - later_s, one.end_s - later_s) for one in self.timeline]

    def _from_call(self, stage: str, began_s: float, ended_s: float) -> StageTime:
        return StageTime(stage, began_s - self.called_s, ended_s - self.called_s)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, ready for JSON."""
        plain = asdict(replace(self, trace=None, verdicts=[]))
        del plain["trace"], plain["called_s"]
        plain["verdicts"] = [verdict.to_dict() for verdict in self.verdicts]
        return {**plain, "cached_tokens": self.cached_tokens, "computed_tokens": self.computed_tokens}

    def to_html(
        self, *, question: str = "", answer: str | None = None, chunks: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """Return the report as a page of its own: the prompt as a heat map, its chunks, the costs; for a file.

        Parameters
        ----------
        question : str
            The page's title.
        answer : str or None
            Shown beside the costs; None leaves it out.
        chunks : sequence of mapping
            What was retrieved, each with ``text`` and perhaps ``source`` and ``score``.

        Returns
        -------
        str
            A whole HTML document that loads nothing, in ASCII.
        """
        return report_page(self.to_dict(), self.trace, question=question, answer=answer, chunks=chunks)

    def _repr_html_(self) -> str:
        """Show the report in a notebook, where scripts may not run."""
        return report_to_html(self.to_dict(), self.trace)
