"""Keeping the index in step with a remote tier that other machines write to as well.

The tier is the truth about what it holds, the disk is a cache of it. So what others have put there becomes a row; a
cached chunk that has got another sidecar there is fetched again when it is read next; and a chunk that is not there any
more, since its document has changed or was deleted, leaves this machine too. Chunks that were never copied there are
not touched.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.damage import warn
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.format import CHECKSUM_NBYTES, FileCodec, file_name, parse_name
from fused_kv_llm.store.index import ChunkIndex, ChunkRow, Place
from fused_kv_llm.store.read import FileReader, as_file
from fused_kv_llm.store.remote import RemoteTier, read_headers
from fused_kv_llm.store.uses import UseLog

__all__ = ["RefreshReport", "Refresher"]

_LEARNT_AT_ONCE = 256
_LENGTH_NBYTES = 8
# So many chunks that go at once, and most of them, are perhaps not what somebody wanted.
_MANY = 16


@dataclass(frozen=True, slots=True)
class RefreshReport:
    """What had changed on a remote tier.

    Parameters
    ----------
    chunks : int
        Chunks that other machines have put there.
    sidecars : int
        Sidecars of chunks that were known, likewise.
    gone : int
        Chunks that are not there any more, and were deleted here.
    """

    chunks: int = 0
    sidecars: int = 0
    gone: int = 0


class Refresher:
    """Compares a remote tier with the index, and mends the index.

    Parameters
    ----------
    remote : RemoteTier
    folder, index, reader, uses : StoreFolder, ChunkIndex, FileReader, UseLog
        The store's.
    codec : FileCodec
        Decodes headers.
    """

    def __init__(
        self,
        remote: RemoteTier,
        folder: StoreFolder,
        index: ChunkIndex,
        reader: FileReader,
        uses: UseLog,
        codec: FileCodec,
    ) -> None:
        self._remote, self._folder, self._index = remote, folder, index
        self._reader, self._uses, self._codec = reader, uses, codec

    def refresh(self) -> RefreshReport:
        """Learn what has changed on the remote tier.

        Raises
        ------
        StoreUnavailableError
            The remote tier cannot be used.
        """
        self._check_tier()
        # Before the tier is listed: what is copied there meanwhile is not in the list and has not gone.
        before = self._index.ledger.remote_keys()
        # What is too short to have a header is nobody's chunk.
        listed = {name: found for name, found in self._remote.versions().items() if found[0] >= _LENGTH_NBYTES}
        sizes = {name: nbytes for name, (nbytes, _) in listed.items()}
        there: dict[str, dict[str, int]] = {}
        parsed = {name: found for name in sizes if (found := parse_name(name)) is not None}
        for name, (key, side) in parsed.items():
            if side is None:
                there.setdefault(key, {})
            elif file_name(key) in sizes:
                there.setdefault(key, {})[side] = sizes[name]
        known = self._index.present(there)
        new = [key for key in there if key not in known]
        added = sum(self._learn(new[at : at + _LEARNT_AT_ONCE], sizes, there)
                    for at in range(0, len(new), _LEARNT_AT_ONCE))  # fmt: skip
        versions = {file_name(key, side): listed[file_name(key, side)][1] for key in there for side in there[key]}
        changed = self._changed(known, there, versions)
        more = sum(self._compare(key, there[key], changed.get(key, set())) for key in known)
        return RefreshReport(added, more, self._forget(before - there.keys(), len(before), is_empty=not there))

    def _check_tier(self) -> None:
        """Believe nothing of what the index says about the tier if it was another one."""
        digest = hashlib.sha256(self._remote.identity.encode()).hexdigest()
        with self._index.transaction():
            known = self._index.remote_marks.swap_tier(digest)
            if known is None or known == digest:
                return
            self._index.remote_marks.forget(self._index.remote_marks.seen())
            kept = 0
            for key in self._index.ledger.remote_keys():
                place = self._index.ledger.place(key)
                if place is not None and place.on_disk:
                    self._index.ledger.move(key, Place(on_disk=True, on_remote=False))
                    kept += 1
        warn(f"{self._remote.url} is another remote tier than the last time. The {kept} chunks on the disk here that "
             "the other one had are kept, and copied to this one when they are evicted or published.")  # fmt: skip

    def _learn(self, keys: Sequence[str], sizes: Mapping[str, int], there: Mapping[str, Mapping[str, int]]) -> int:
        beginnings = read_headers(self._remote, {file_name(key): sizes[file_name(key)] for key in keys})
        added = 0
        for key in keys:
            name = file_name(key)
            if name not in beginnings:
                continue
            with as_file(beginnings[name]) as fd:
                try:
                    header = self._codec.read_chunk_header(fd, key, sizes[name])
                except ChunkDamagedError as error:
                    self._uses.add(damaged=1)
                    warn(f"The KV of chunk {key} on {self._remote.url} cannot be used: {error.reason}. "
                         "It is computed afresh.")  # fmt: skip
                    continue
            row = ChunkRow.from_header(header, sizes[name])
            with self._index.transaction():
                if not self._index.present([key]):
                    self._index.add(row, header.content)
                    place = Place(on_disk=False, on_remote=True)
                    self._index.ledger.add(key, row.nbytes, header.num_tokens, 0.0, place)
                    for side, nbytes in there[key].items():
                        self._index.ledger.add_sidecar(key, side, nbytes)
                    added += 1
        return added

    def _changed(
        self, known: Iterable[str], there: Mapping[str, Mapping[str, int]], versions: Mapping[str, str]
    ) -> dict[str, set[str]]:
        """Return those sidecars of known chunks, as large as ever, that are not what the disk has; note versions."""
        seen, changed, here = self._index.remote_marks.seen(), dict[str, set[str]](), dict[str, tuple[str, str]]()
        for key in known:
            place, sidecars = self._index.ledger.place(key), self._index.ledger.sidecars(key)
            for side in there[key].keys() & sidecars.keys() if place is not None else ():
                name = file_name(key, side)
                is_same = bool(versions[name]) and seen.get(name) == versions[name]
                if place is not None and place.on_disk and not (is_same and place.on_remote):
                    here[name] = (key, side)
                elif not is_same and name in seen:
                    # Not on the disk, but perhaps in memory.
                    changed.setdefault(key, set()).add(side)
        for at in range(0, len(here), _LEARNT_AT_ONCE):
            names = list(here)[at : at + _LEARNT_AT_ONCE]
            beginnings = self._remote.get(names, CHECKSUM_NBYTES)
            for name in names:
                if self._begins(*here[name]) != beginnings.get(name):
                    changed.setdefault(here[name][0], set()).add(here[name][1])
        held = {file_name(key, side) for key, sides in changed.items() for side in sides} & here.keys()
        new = {name: version for name, version in versions.items() if seen.get(name) != version and name not in held}
        with self._index.transaction():
            self._index.remote_marks.note(new)
            self._index.remote_marks.forget(seen.keys() - versions.keys())
        return changed

    def _begins(self, key: str, side: str) -> bytes | None:
        """Return the beginning of a sidecar on the disk; None if it is not there."""
        try:
            with open(self._folder.open_file(key, side), "rb") as file:
                return file.read(CHECKSUM_NBYTES)
        except OSError:
            return None

    def _compare(self, key: str, there: Mapping[str, int], changed: set[str]) -> int:
        """Take note of what the tier has of a chunk that is known; return how many sidecars are new or changed."""
        with self._index.transaction():
            place, sidecars = self._index.ledger.place(key), self._index.ledger.sidecars(key)
            if place is None:
                return 0
            new = [name for name, nbytes in there.items() if sidecars.get(name) != nbytes or name in changed]
            if not place.on_remote:
                # Computed on both machines. What only this one has is copied when the chunk is evicted.
                if place.on_disk and not new and sidecars.keys() <= there.keys():
                    self._index.ledger.move(key, Place(on_disk=True, on_remote=True))
                return 0
            if not new:
                return 0
            if place.on_disk:
                # What is cached lacks them. A chunk that is being read is left for the next time.
                if not self._folder.evict(key):
                    return 0
                for name in sidecars:
                    self._folder.remove(key, name)
                self._index.ledger.move(key, Place(on_disk=False, on_remote=True))
            for name in sidecars.keys() - there.keys():
                self._index.ledger.drop_sidecar(key, name)
            for name in new:
                self._index.ledger.add_sidecar(key, name, there[name])
        self._reader.forget(key, *sidecars)
        return len(new)

    def _forget(self, gone: set[str], known: int, *, is_empty: bool) -> int:
        """Delete chunks that the tier does not have any more, and return how many."""
        if gone and is_empty:
            # A server that was emptied, or another bucket: that is no reason to throw a cache away.
            warn(f"Nothing is left of {len(gone)} chunks on {self._remote.url}. What is on the disk here is kept, and "
                 "copied there again when it is evicted.")  # fmt: skip
        elif len(gone) > max(_MANY, known // 2):
            warn(f"{len(gone)} of {known} chunks are not on {self._remote.url} any more and are deleted here too. "
                 "If nobody has deleted them, look whether that server evicts: a Redis needs "
                 "maxmemory-policy noeviction.")  # fmt: skip
        forgotten = 0
        for key in gone:
            with self._index.transaction():
                place, sidecars = self._index.ledger.place(key), self._index.ledger.sidecars(key)
                if place is None or not place.on_remote:
                    continue
                if is_empty and place.on_disk:
                    self._index.ledger.move(key, Place(on_disk=True, on_remote=False))
                    continue
                self._index.remove([key], "deleted")
                for name in (None, *sidecars):
                    self._folder.remove(key, name)
            self._reader.forget(key, *sidecars)
            forgotten += 1
        return forgotten
