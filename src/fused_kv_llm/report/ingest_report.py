"""What one ingestion did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["IngestReport"]


@dataclass(slots=True)
class IngestReport:
    """What one ingestion did.

    Parameters
    ----------
    chunks_total : int
        Texts given.
    chunks_new : int
        Chunks written, prefilled or adopted.
    chunks_adopted : int
        Those of them that were not prefilled, since answered prompts had left their KV.
    chunks_present : int
        Chunks that were in the store already.
    chunks_duplicate : int
        Texts equal to another one of the same call.
    chunks_skipped : int
        Texts that are empty or too short to be found in a prompt.
    chunks_preprocessed : int
        Chunks preprocessed for the first time, if the call waited for it.
    chunks_refreshed : int
        Chunks preprocessed again because their neighbours have changed, if the call waited for it.
    chunks_pending : int
        Chunks of the whole corpus that were not preprocessed when the call returned. They can be asked about.
    chunks_stale : int
        Chunks of the whole corpus whose neighbours have changed since they were preprocessed, if the call waited for
        preprocessing. They stay usable.
    chunks_deleted : int
        Stored chunks that lost their KV because they are not in the corpus any more.
    tokens : int
        Tokens prefilled.
    neighbour_tokens : int
        Tokens of similar chunks that had to be computed beside those that were preprocessed.
    bytes_written : int
        Bytes of files written.
    seconds : float
        Wall-clock time until all new chunks could be asked about.
    preprocessing_seconds : float
        Wall-clock time of the preprocessing that followed, if the call waited for it.
    """

    chunks_total: int = 0
    chunks_new: int = 0
    chunks_present: int = 0
    chunks_duplicate: int = 0
    chunks_skipped: int = 0
    chunks_preprocessed: int = 0
    chunks_refreshed: int = 0
    chunks_pending: int = 0
    chunks_stale: int = 0
    chunks_deleted: int = 0
    tokens: int = 0
    neighbour_tokens: int = 0
    bytes_written: int = 0
    seconds: float = 0.0
    preprocessing_seconds: float = 0.0
    chunks_adopted: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Tokens prefilled per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def chunks_per_minute(self) -> float:
        """Chunks written per minute."""
        return 60.0 * self.chunks_new / self.seconds if self.seconds > 0 else 0.0

    def summary(self) -> str:
        """Return one line for people."""
        if self.chunks_total == 0:
            return self._preprocessing() or "nothing to preprocess"
        prefilled = self.chunks_new - self.chunks_adopted
        parts = [f"{prefilled} chunks prefilled"]
        if prefilled:
            speed = f"{self.tokens_per_s:.0f} tokens/s, {self.chunks_per_minute:.0f} chunks/min"
            parts[0] += f" ({self.tokens} tokens, {speed})"
        if self.chunks_adopted:
            parts.append(f"{self.chunks_adopted} taken from answered prompts")
        if self.bytes_written:
            parts.append(f"{self.bytes_written / 1e6:.1f} MB written")
        if self.chunks_present:
            parts.append(f"{self.chunks_present} already stored")
        if self.chunks_duplicate:
            parts.append(f"{self.chunks_duplicate} duplicates")
        if self.chunks_skipped:
            parts.append(f"{self.chunks_skipped} skipped (empty or too short to be found in a prompt)")
        if self.chunks_deleted:
            parts.append(f"{self.chunks_deleted} deleted")
        first = ", ".join(parts) + f" in {self.seconds:.1f} s"
        return "; ".join(filter(None, [first, self._preprocessing()]))

    def _preprocessing(self) -> str:
        parts = []
        if self.chunks_preprocessed:
            parts.append(f"{self.chunks_preprocessed} preprocessed")
        if self.chunks_refreshed:
            parts.append(f"{self.chunks_refreshed} refreshed")
        if parts:
            parts[-1] += f" in {self.preprocessing_seconds:.1f} s"
        if self.neighbour_tokens:
            parts.append(f"after {self.neighbour_tokens} tokens of similar chunks")
        if self.chunks_pending:
            parts.append(f"{self.chunks_pending} not preprocessed yet")
        if self.chunks_stale:
            parts.append(f"{self.chunks_stale} have new neighbours (refresh preprocesses them again)")
        return ", ".join(parts)
