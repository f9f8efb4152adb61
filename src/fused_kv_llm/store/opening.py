"""Opening a chunk: in memory, on the disk or on the remote tier; what cannot be used is a miss."""

from __future__ import annotations

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.damage import warn
from fused_kv_llm.store.format import ChunkHeader, file_name
from fused_kv_llm.store.parts import StoreParts
from fused_kv_llm.store.read import OpenFile, ResidentFile, StoredKV, Tier

__all__ = ["open_chunk"]


def open_chunk(parts: StoreParts, key: str, token_ids: tuple[int, ...], *, keeps: bool) -> StoredKV | None:
    """Open a chunk's KV for reading.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    key : str
        The chunk.
    token_ids : tuple of int
        The chunk's stand-alone token ids; a hit has exactly these.
    keeps : bool
        Whether what is read completely is kept in memory.

    Returns
    -------
    StoredKV or None
        None if the chunk is not stored, or not usable (with a ``FusedKVWarning``).
    """
    try:
        found = _find(parts, key, keeps)
    except FileNotFoundError:
        parts.damage.vanished(key)
        return None
    except ChunkDamagedError as error:
        parts.damage.discard(key, error.reason)
        return None
    except OSError as error:
        warn(f"The stored KV of chunk {key} cannot be read now ({error}). It is computed afresh.")
        return None
    if found is None:
        return None
    tier, file = found
    header = file.header
    if not isinstance(header, ChunkHeader) or header.token_ids != token_ids:
        file.release()
        parts.damage.discard(key, "its token ids are not those expected")
        return None
    return StoredKV(tier, header, file)


def _find(parts: StoreParts, key: str, keeps: bool) -> tuple[Tier, ResidentFile | OpenFile] | None:
    """Return the chunk's file and the tier it comes from; None if the chunk is not stored."""
    file = parts.reader.find(key, keeps=keeps)
    tier: Tier = "disk"
    if file is None:
        place = parts.index.ledger.place(key)
        if place is None:
            # Another process may have deleted it: this one's memory must not serve it any more.
            parts.reader.forget(key)
            return None
        if not place.on_disk:
            # What was evicted to the remote tier may still be in memory.
            file = parts.memory.get(file_name(key))
            if file is None and key in parts.fetch([key]):
                tier = "remote"
        file = file or parts.reader.acquire(key, keeps=keeps)
    return ("memory" if isinstance(file, ResidentFile) else tier), file
