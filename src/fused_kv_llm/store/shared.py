"""The remote tier as a store that many machines write to and read from; each machine's disk is a cache of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fused_kv_llm.chunk import ContentHash
from fused_kv_llm.errors import ChunkDamagedError, StoreUnavailableError
from fused_kv_llm.store.audit import CheckReport, Progress, check_remote
from fused_kv_llm.store.format import check_key, file_name
from fused_kv_llm.store.index import ChunkRow, Place
from fused_kv_llm.store.parts import StoreParts
from fused_kv_llm.store.publishing import Publisher
from fused_kv_llm.store.read import as_file, verify_chunk
from fused_kv_llm.store.refresh import RefreshReport
from fused_kv_llm.store.remote import RemoteTier

__all__ = ["SharedTier", "StoredElsewhere"]

_PRESENT_NBYTES = 8


@dataclass(frozen=True, slots=True)
class StoredElsewhere:
    """What another process has put on the remote tier.

    Parameters
    ----------
    row : ChunkRow
        The chunk; the bytes are those of its own file.
    content : ContentHash
        Hashes of its text.
    sidecars : dict of str to int
        Names and bytes of its sidecars.
    """

    row: ChunkRow
    content: ContentHash
    sidecars: Mapping[str, int] = field(default_factory=dict)


class SharedTier:
    """What is done with the remote tier of one store besides evicting and reading, ``KVStore.shared``.

    Any number of machines may do it at once. An object is written whole, under a name that says what it holds, so two
    that write the same chunk write the same object.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    """

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts

    def present(self, keys: Sequence[str]) -> set[str]:
        """Return those of some chunks that the remote tier has objects of, asking it; raises as :meth:`publish`.

        Whether an object is sound is known when it was read (:meth:`bring`). What is not there, though the index says
        so, is noted: the next :meth:`publish` copies it again.
        """
        self._parts.check_open()
        names = {file_name(check_key(key)): key for key in keys}
        found = self._remote().get(list(names), _PRESENT_NBYTES)
        there = {names[name] for name, data in found.items() if len(data) == _PRESENT_NBYTES}
        if not self._parts.read_only:
            for key in names.values():
                if key not in there:
                    self._note_absent(key)
        return there

    def publish(self, keys: Iterable[str] | None = None) -> int:
        """Copy chunks and their sidecars to the remote tier now, and keep them on the disk.

        Parameters
        ----------
        keys : iterable of str or None
            Chunks on the disk; those that the tier has already cost nothing. None is all.

        Returns
        -------
        int
            Bytes copied. A chunk's own file that another machine has put there is not copied again, unless its header
            is damaged.

        Raises
        ------
        StoreUnavailableError
            There is no remote tier, or it cannot be used; or this store is read-only; or chunks are there that were
            written with another encryption key.
        """
        self._parts.check_writable()
        publisher = Publisher(self._parts, self._remote())
        wanted = self._parts.index.ledger.unpublished() if keys is None else [check_key(key) for key in keys]
        return publisher.run(dict.fromkeys(wanted))

    def bring(self, keys: Sequence[str]) -> set[str]:
        """Bring chunks to the disk, also such as the index does not know yet, in one call.

        Parameters
        ----------
        keys : sequence of str

        Returns
        -------
        set of str
            Those of `keys` that are on the disk now. What is not on the remote tier, or damaged there, is left out. A
            damaged object is deleted, so that it can be published again.

        Raises
        ------
        StoreUnavailableError, StoreFullError
            The remote tier or the disk cannot be used.
        """
        self._parts.check_writable()
        remote = self._remote()
        wanted = [check_key(key) for key in keys]
        known = self._parts.index.present(wanted)
        self._parts.fetch([key for key in wanted if key in known])
        unknown = [key for key in dict.fromkeys(wanted) if key not in known]
        for name, data in remote.get([file_name(key) for key in unknown]).items():
            self._take(name, memoryview(data))
        return {key for key in wanted if self._parts.folder.has(key)}

    def note(self, stored: Iterable[StoredElsewhere]) -> None:
        """Take note of what others have put on the remote tier, without asking it."""
        self._parts.check_writable()
        ledger = self._parts.index.ledger
        for one in stored:
            key = one.row.key
            with self._parts.index.transaction():
                if not self._parts.index.present([key]):
                    self._parts.index.add(one.row, one.content)
                    place = Place(on_disk=False, on_remote=True)
                    ledger.add(key, one.row.nbytes, float(len(one.row.token_ids)), 0.0, place)
                place = ledger.place(key) or Place(on_disk=False, on_remote=False)
                # On the disk there are those that this machine has written, and nothing else.
                if not place.on_disk:
                    for name, nbytes in one.sidecars.items():
                        ledger.add_sidecar(key, name, nbytes)

    def refresh(self) -> RefreshReport:
        """Learn what other machines have changed on the remote tier; see :mod:`fused_kv_llm.store.refresh`.

        Raises
        ------
        StoreUnavailableError
            There is no remote tier, or it cannot be used; or this store is read-only.
        """
        self._parts.check_writable()
        self._remote()
        return self._parts.refresh()

    def check(self, *, fix: bool = False, progress: Progress | None = None) -> CheckReport:
        """Read every object of the remote tier and compare it with its row.

        Open the store with ``learn=False``, or the rows have just been brought in step.

        Parameters
        ----------
        fix : bool
            Mend what was found: delete damaged objects, of which the disk's copy is published anew, and sidecars
            without a chunk; add rows of undamaged objects; drop rows without one.
        progress : callable or None
            Called with the number of bytes read and their number.

        Returns
        -------
        CheckReport
            Of the remote tier alone.

        Raises
        ------
        StoreUnavailableError
            There is no remote tier, or it cannot be used. To mend: the store is read-only, or none of the files on
            its disk was written with its key.
        """
        if fix:
            self._parts.check_writable()
        else:
            self._parts.check_open()
        parts = self._parts
        return check_remote(parts.folder, parts.index, parts.codec, self._remote(), fix=fix, progress=progress)

    def _remote(self) -> RemoteTier:
        if self._parts.tier is None:
            raise StoreUnavailableError(
                f"The store in {self._parts.folder.root} has no remote tier: open it with remote=URL (--remote)."
            )
        return self._parts.tier

    def _note_absent(self, key: str) -> None:
        with self._parts.index.transaction():
            place = self._parts.index.ledger.place(key)
            if place is None or not place.on_remote:
                return
            if place.on_disk:
                self._parts.index.ledger.move(key, Place(on_disk=True, on_remote=False))
            else:
                self._parts.index.remove([key], "deleted")

    def _take(self, name: str, data: memoryview) -> None:
        key = name.partition(".")[0]
        with self._parts.writer.lock(key), as_file(data) as fd:
            try:
                header = verify_chunk(self._parts.codec, fd, key)
            except ChunkDamagedError as error:
                self._parts.promoter_of().refuse(key, error)
                return
            row = ChunkRow.from_header(header, len(data))
            if self._parts.writer.write(row, header.content, [data], float(header.num_tokens)):
                with self._parts.index.transaction():
                    self._parts.index.ledger.move(key, Place(on_disk=True, on_remote=True))
