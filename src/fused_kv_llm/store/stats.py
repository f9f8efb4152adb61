"""What a store holds, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from fused_kv_llm.store.index import IdentityTotals
from fused_kv_llm.store.uses import StoreCounters

__all__ = ["ChunkStanding", "StoreStats"]


@dataclass(frozen=True, slots=True)
class ChunkStanding:
    """Where a stored chunk is, and how it was used.

    Parameters
    ----------
    tier : {"memory", "disk", "remote"}
        The quickest that has it, as seen from this process.
    uses : int
        How often its KV was used, by all processes.
    used_s : float
        When last, or when it was stored if never, in seconds since 1970.
    """

    tier: str
    uses: int
    used_s: float


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store holds.

    Parameters
    ----------
    chunks, tokens : int
        Chunks in the index, and their tokens.
    bytes_on_disk : int
        Size of the chunks' files without their sidecars, on the disk or the remote tier.
    memory_chunks, memory_bytes : int
        Chunks in this process's memory tier, and the bytes of all that it holds, sidecars included.
    by_identity : dict of str to int
        Chunks by identity digest.
    tiers : dict of str to tuple of int
        Chunks and bytes by tier, disk and remote; sidecars included, a chunk can be in both. The bytes on the disk
        are those that count towards the budget. The index, temporary files and the quarantine do not.
    sidecars : dict of str to tuple of int
        Sidecars and their bytes by tier, which ``tiers`` includes.
    disk_bytes : int or None
        The disk budget: most bytes of ``tiers["disk"]``.
    hottest : list of tuple of str and int
        The most used chunks and their uses, ingestion included.
    identities : list of IdentityTotals
        Chunks, tokens and bytes by identity and tier.
    lifetime : StoreCounters
        What all processes have done with the store since its index was made; of one that is still open, what it
        has told the index (every ten seconds when it reads).
    """

    chunks: int
    tokens: int
    bytes_on_disk: int
    memory_chunks: int
    memory_bytes: int
    by_identity: dict[str, int] = field(default_factory=dict)
    tiers: dict[str, tuple[int, int]] = field(default_factory=dict)
    sidecars: dict[str, tuple[int, int]] = field(default_factory=dict)
    disk_bytes: int | None = None
    hottest: list[tuple[str, int]] = field(default_factory=list)
    identities: list[IdentityTotals] = field(default_factory=list)
    lifetime: StoreCounters = field(default_factory=StoreCounters)
