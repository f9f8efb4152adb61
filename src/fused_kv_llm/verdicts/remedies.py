"""What helps a chunk that was not reused."""

from __future__ import annotations

from fused_kv_llm.report import Outcome

__all__ = ["remedy_of"]

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


def remedy_of(outcome: Outcome) -> str:
    """Return what helps; empty where nothing has to be done."""
    return _REMEDIES.get(outcome, "")
