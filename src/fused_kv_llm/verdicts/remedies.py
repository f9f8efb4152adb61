"""Verdicts, each with what helps a chunk that was not reused."""

from __future__ import annotations

from typing import Any

from fused_kv_llm.report import Outcome, Verdict

__all__ = ["verdict_of"]

_REMEDIES = {
    Outcome.RECOMPUTED: "Ask with a lower recompute_ratio.",
    Outcome.NOT_INGESTED: "Ingest it: build_kv_cache([text]). With store_misses=True it is stored after the answer.",
    Outcome.OTHER_SETTINGS: "Ask with the settings of the ingestion, or ingest it again with these.",
    Outcome.OTHER_TENANT: "Ingest it for this tenant; chunks of different tenants are kept apart by design.",
    Outcome.RESPACED: "Pass the chunk on as it was ingested, without re-wrapping, dedenting or stripping inside.",
    Outcome.ESCAPED: "Put the joined texts into the prompt, not a list or JSON; in mustache write {{{x}}}.",
    Outcome.SHORTENED: "Put FusedKVRetriever around what shortens it, and ingest what that returns.",
    Outcome.REWRITTEN: "Pass the chunk on as it was ingested, or ingest what is put into the prompt.",
    Outcome.NOT_IN_PROMPT: "Have the prompt contain it, if it should: a re-ranker, or a limit, may have dropped it.",
    Outcome.TOO_SHORT: "Make longer chunks.",
    Outcome.TOO_LONG: "Make shorter chunks.",
    Outcome.OVERLAP: "Split with less overlap, or retrieve fewer chunks that overlap.",
    Outcome.EVICTED: "Raise disk_bytes, or give a remote tier; ingest it again.",
    Outcome.DELETED: "Ingest it again, if it is still part of the corpus.",
    Outcome.DAMAGED: "Nothing with store_misses=True, which stores it again. Otherwise ingest it again.",
    Outcome.NOT_LOADED: "Ask again. If it stays so, look after the disk or the remote tier; see load_timeout_s.",
}


def verdict_of(text: str, outcome: Outcome, detail: str, key: str | None = None, **more: Any) -> Verdict:
    """Return a verdict on a chunk with what helps, if something has to be done.

    Parameters
    ----------
    text : str
        Of the whole chunk.
    outcome : Outcome
    detail : str
    key : str or None
        The chunk's, where one is known.
    more
        Further fields of the verdict.
    """
    return Verdict.of(text, outcome, detail, _REMEDIES.get(outcome, ""), chunk_id=key, **more)
