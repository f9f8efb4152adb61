"""The texts that a retriever has returned, which the LLM expects in its next prompts.

LangChain runs every step of a chain in a copy of the context, so a context variable that a retriever sets does not
reach the LLM. The retriever registers its texts on the LLM instead. Reuse never depends on them: they only serve to
warn when retrieved texts do not reach the prompt verbatim.
"""

from __future__ import annotations

import html
import json
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from fused_kv_llm.chunk import chunk_texts
from fused_kv_llm.report import Verdict

__all__ = ["RetrievalCheck", "RetrievalLog", "explain_mismatch"]

_BEGINNING_CHARS = 80
_PROBE_CHARS = 48

_ESCAPED = (
    "they are there with their line breaks escaped, as in the text of a Python list or of JSON. Join them "
    'before they reach the prompt: retriever | (lambda docs: "\\n\\n".join(d.page_content for d in docs))'
)
_HTML = "they are there HTML-escaped, as mustache does with {{context}}: write {{{context}}} instead"
_WHITESPACE = "they are there with other white space: pass page_content on without re-wrapping or dedenting it"
_SHORTENED = (
    "only their beginnings are there: something between the retriever and the prompt shortens them (a "
    "compressor, an extractor, a template that truncates). Put FusedKVRetriever around that step, and ingest "
    "what it returns"
)
_UNKNOWN = (
    "likely causes: documents put into the prompt as a Python list instead of their joined page_content, "
    "mustache escaping ({{x}} instead of {{{x}}}), a compressor or a template that rewrites or truncates "
    "them, or a call that was never meant to contain them"
)


@dataclass(frozen=True, slots=True)
class RetrievalCheck:
    """What one prompt contains of recent retrievals.

    Parameters
    ----------
    unmatched : list of str
        Beginnings of the retrieved texts that are not in the prompt verbatim.
    explanation : str or None
        The reason, if none of the retrieved texts is in the prompt; None if some are, or if nothing was retrieved
        since the last prompt.
    texts : tuple of str
        The retrieved texts that the prompt should contain; empty where several retrievals wait and the prompt has
        nothing of any, since nobody knows then which one it belongs to.
    scores : tuple of float or None
        What the retriever gave each of `texts`.
    """

    unmatched: list[str]
    explanation: str | None
    texts: tuple[str, ...] = ()
    scores: tuple[float | None, ...] = ()

    def scored(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return verdicts, of which those on `texts` come first, with the scores of these."""
        known = [replace(one, score=score) for one, score in zip(verdicts, self.scores, strict=False)]
        return [*known, *verdicts[len(known) :]]


class RetrievalLog:
    """Recent retrievals that have not yet been seen in a prompt; thread-safe.

    Parameters
    ----------
    limit : int
        How many retrievals to remember; older ones are forgotten.

    Examples
    --------
    >>> log = RetrievalLog()
    >>> log.add(["The ferry leaves at nine."])
    >>> log.check("Context: The ferry leaves at nine. When does it leave?").unmatched
    []
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._pending: deque[_Retrieval] = deque()
        self._forgotten = 0
        self._lock = Lock()

    def add(self, texts: Iterable[str], scores: Sequence[float | None] = ()) -> None:
        """Remember the texts of one retrieval, and the scores that it gave them, if it did."""
        found = chunk_texts(texts)
        kept = dict[str, float | None]()
        for text, score in zip(found, scores or [None] * len(found), strict=True):
            if text:
                # A score that is no number says nothing, and no JSON has it.
                kept.setdefault(text, score if score is not None and math.isfinite(score) else None)
        if kept:
            with self._lock:
                self._pending.append(_Retrieval(tuple(kept), tuple(kept.values())))
                while len(self._pending) > self._limit:
                    self._forgotten += not self._pending.popleft().seen

    def check(self, prompt: str) -> RetrievalCheck:
        """Look for the pending retrievals in a prompt.

        The prompt belongs to the retrieval of which it contains the largest share. In a batch several retrievals
        wait at once and may share texts: those of which the prompt contains a smaller share go on waiting, but cause
        no warning any more. A prompt that contains none of the texts settles all retrievals, so that it is reported
        once.

        Parameters
        ----------
        prompt : str
            As the framework rendered it.

        Returns
        -------
        RetrievalCheck
        """
        is_certain = True
        with self._lock:
            matches = [(waiting, waiting.share_in(prompt)) for waiting in self._pending]
            best = max((share for _, share in matches), default=0.0)
            if best > 0:
                closest = [waiting for waiting, share in matches if share == best]
                concerned = max(closest, key=lambda waiting: sum(map(len, waiting.texts)))
                for waiting, share in matches:
                    waiting.seen |= share > 0
                self._pending.remove(concerned)
            elif self._forgotten:
                # The prompt may belong to one of those.
                self._forgotten -= 1
                return RetrievalCheck([], None)
            else:
                unseen = [waiting for waiting, _ in matches if not waiting.seen]
                concerned = unseen[-1] if unseen else _Retrieval(())
                is_certain = len(unseen) == 1
                self._pending = deque(w for w, _ in matches if w.seen)
        missing = [text for text in concerned.texts if text not in prompt]
        unmatched = [text[:_BEGINNING_CHARS] for text in missing]
        explanation = explain_mismatch(prompt, missing) if missing and best == 0 else None
        if not is_certain:
            return RetrievalCheck(unmatched, explanation)
        return RetrievalCheck(unmatched, explanation, concerned.texts, concerned.scores)


@dataclass(slots=True, eq=False)
class _Retrieval:
    texts: tuple[str, ...]
    scores: tuple[float | None, ...] = ()
    seen: bool = False

    def share_in(self, prompt: str) -> float:
        return sum(text in prompt for text in self.texts) / len(self.texts)


def explain_mismatch(prompt: str, texts: Iterable[str]) -> str:
    """Explain why texts are not in a prompt verbatim, as far as the prompt shows the reason.

    Parameters
    ----------
    prompt : str
    texts : iterable of str
        Stripped texts, none of them in the prompt.

    Returns
    -------
    str
        The cause and how to mend it.
    """
    flat_prompt = " ".join(prompt.split())
    for text in texts:
        forms = {
            _ESCAPED: (repr(text)[1:-1], json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]),
            _HTML: (
                html.escape(text),
                html.escape(text, quote=False),
                html.escape(text).replace("&#x27;", "'"),
            ),
        }
        for cause, candidates in forms.items():
            if any(candidate in prompt for candidate in candidates):
                return cause
        if " ".join(text.split()) in flat_prompt:
            return _WHITESPACE
        if len(text) > _PROBE_CHARS and text[:_PROBE_CHARS] in prompt:
            return _SHORTENED
    return _UNKNOWN
