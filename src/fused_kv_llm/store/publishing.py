"""Copying chunks to a remote tier that other machines write to as well, without trusting what is there already."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fused_kv_llm.errors import ChunkDamagedError, ChunkKeyError, StoreUnavailableError
from fused_kv_llm.store.format import file_name
from fused_kv_llm.store.index import Place
from fused_kv_llm.store.parts import StoreParts
from fused_kv_llm.store.read import as_file
from fused_kv_llm.store.remote import RemoteTier, read_headers

__all__ = ["Publisher"]

_ASKED_AT_ONCE = 256
_PRESENT_NBYTES = 8


class Publisher:
    """Copies what one store has on its disk to its remote tier.

    Parameters
    ----------
    parts : StoreParts
        The store's.
    remote : RemoteTier
    """

    def __init__(self, parts: StoreParts, remote: RemoteTier) -> None:
        self._parts, self._remote = parts, remote
        self._ledger = parts.index.ledger

    def run(self, keys: Iterable[str]) -> int:
        """Copy those of some chunks that the index says are not there; see ``SharedTier.publish``."""
        waiting = [key for key in keys if self._is_waiting(key)]
        there, foreign = self._sound(waiting)
        nbytes = sum(self._publish(key, with_chunk=key not in there) for key in waiting if key not in foreign)
        if foreign:
            raise StoreUnavailableError(
                f"{len(foreign)} chunks, {sorted(foreign)[0][:16]} among them, are on {self._remote.url} already, "
                "written with another encryption key, and were not replaced. Give every machine the same key "
                "(FUSED_KV_ENCRYPTION_KEY), or this store a tier of its own."
            )
        return nbytes

    def _is_waiting(self, key: str) -> bool:
        place = self._ledger.place(key)
        return place is not None and place.on_disk and not place.on_remote

    def _sound(self, keys: Sequence[str]) -> tuple[set[str], set[str]]:
        """Return the chunks whose objects have a sound header, and those whose objects are another encryption key's.

        An object that is damaged is in neither: it is replaced by the disk's copy.
        """
        if len(keys) > _ASKED_AT_ONCE:
            # One listing is cheaper than asking for each of them.
            sizes = self._remote.sizes()
            keys = [key for key in keys if file_name(key) in sizes]
        sound, foreign = set[str](), set[str]()
        for at in range(0, len(keys), _ASKED_AT_ONCE):
            batch = list(keys[at : at + _ASKED_AT_ONCE])
            rows, _ = self._parts.index.rows(batch)
            sizes_here = {file_name(key): row.nbytes for key, row in rows.items()}
            headers = read_headers(self._remote, sizes_here)
            for key, row in rows.items():
                data = headers.get(file_name(key))
                if data is None:
                    continue
                try:
                    with as_file(data) as fd:
                        # The same chunk of the same model takes as many bytes, whoever has written it.
                        self._parts.codec.read_chunk_header(fd, key, row.nbytes)
                    sound.add(key)
                except ChunkKeyError:
                    foreign.add(key)
                except ChunkDamagedError as error:
                    self._parts.promoter_of().report(key, error.reason, "It is replaced by this machine's copy.")
        return sound, foreign

    def _publish(self, key: str, *, with_chunk: bool) -> int:
        sidecars = self._ledger.sidecars(key)
        nbytes = 0
        try:
            # The chunk comes last, so that its sidecars are there when it is.
            for name in (*sidecars, *((None,) if with_chunk else ())):
                nbytes += self._copy(key, name)
            if with_chunk and sidecars:
                # Until the chunk was there, a check on another machine may have taken them for left over.
                names = {file_name(key, name): name for name in sidecars}
                kept = self._remote.get(list(names), _PRESENT_NBYTES)
                nbytes += sum(self._copy(key, name) for file, name in names.items() if file not in kept)
        except FileNotFoundError:
            # Another process has evicted or deleted the chunk.
            return nbytes
        with self._parts.index.transaction():
            # A sidecar that came meanwhile is copied with the next call.
            if self._is_waiting(key) and self._ledger.sidecars(key) == sidecars:
                self._ledger.move(key, Place(on_disk=True, on_remote=True))
        self._parts.uses.add(demoted=1)
        return nbytes

    def _copy(self, key: str, name: str | None) -> int:
        with open(self._parts.folder.open_file(key, name), "rb") as file:
            data = file.read()
        self._remote.put(file_name(key, name), [memoryview(data)])
        return len(data)
