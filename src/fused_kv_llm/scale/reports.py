"""What a distributed ingestion did, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from fused_kv_llm.report import IngestReport

__all__ = ["DistributedIngestReport"]


@dataclass(slots=True)
class DistributedIngestReport(IngestReport):
    """What one distributed ingestion did.

    Parameters
    ----------
    actors : int
        Actors that were asked for.
    actors_replaced : int
        Actors that died and were replaced.
    batches_retried : int
        Batches that were computed again, since their actor died or the store could not be reached.
    dtype, kv_dtype : str
        What the model computes in, and what is stored.
    """

    actors: int = 0
    actors_replaced: int = 0
    batches_retried: int = 0
    dtype: str = ""
    kv_dtype: str = ""

    def summary(self) -> str:
        """Return one line for people."""
        # Not super() alone: with slots, a dataclass is made anew and the bare form does not find itself.
        parts = [IngestReport.summary(self), f"{self.actors} actors"]
        if self.actors_replaced:
            parts.append(f"{self.actors_replaced} replaced after they died")
        if self.batches_retried:
            parts.append(f"{self.batches_retried} batches computed again")
        return f"{parts[0]}; {', '.join(parts[1:])}"
