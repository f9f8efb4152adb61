"""Pins: chunks that are kept from being evicted for as long as somebody holds them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fused_kv_llm.store.format import check_key
from fused_kv_llm.store.parts import StoreParts

__all__ = ["StorePins"]


class StorePins:
    """Who holds which chunks of a store, ``KVStore.pins``; kept in its folder.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    """

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts

    def add(self, keys: Iterable[str], holder: str) -> None:
        """Keep chunks from being evicted from the disk, for as long as somebody holds them.

        Parameters
        ----------
        keys : iterable of str
            Of chunks, whether they are stored yet or not. They can be deleted all the same.
        holder : str
            For whose sake, such as a document's id.
        """
        self._parts.check_writable()
        wanted = [check_key(key) for key in keys]
        with self._parts.index.transaction():
            self._parts.index.pins.add(wanted, holder)

    def remove(self, holder: str) -> None:
        """Let go of everything that somebody has pinned; what others hold as well stays pinned."""
        self._parts.check_writable()
        with self._parts.index.transaction():
            self._parts.index.pins.remove(holder)

    def of(self, keys: Sequence[str]) -> set[str]:
        """Return those of some chunks that are pinned, by their keys."""
        self._parts.check_open()
        return self._parts.index.pins.of([check_key(key) for key in keys])

    def holders(self) -> set[str]:
        """Return everybody who has pinned something."""
        self._parts.check_open()
        return self._parts.index.pins.holders()

    def nbytes(self, identities: Iterable[str], keys: Iterable[str] = ()) -> int:
        """Return how many bytes the pinned chunks take whose identities have these digests.

        Parameters
        ----------
        identities : iterable of str
        keys : iterable of str
            Further chunks of these identities, which count as if they were pinned.
        """
        self._parts.check_open()
        return self._parts.index.pins.nbytes(identities, [check_key(key) for key in keys])
