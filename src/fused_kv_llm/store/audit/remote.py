"""The audit of a remote tier: every object is read and verified, and compared with the rows.

The kinds of findings are those of the disk's audit. What is foreign is left where it is, since a bucket may hold other
things. Other machines that use the tier notice what was mended when they next compare their index with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fused_kv_llm.errors import ChunkDamagedError, ChunkKeyError
from fused_kv_llm.store.audit.audit import Audit
from fused_kv_llm.store.audit.findings import Progress
from fused_kv_llm.store.format import ChunkHeader, file_name, parse_name
from fused_kv_llm.store.index import ChunkRow, Place
from fused_kv_llm.store.read import as_file, verify_chunk, verify_sidecar
from fused_kv_llm.store.remote import RemoteTier

__all__ = ["RemoteAudit"]

_READ_AT_ONCE_NBYTES = 64 * 2**20
_PRESENT_NBYTES = 8


class RemoteAudit:
    """Audits the objects of a remote tier, after the disk was audited.

    Parameters
    ----------
    audit : Audit
        Receives the findings.
    remote : RemoteTier
    """

    def __init__(self, audit: Audit, remote: RemoteTier) -> None:
        self._audit, self._remote = audit, remote
        self._index = audit.index
        self._damaged: set[str] = set()
        self._sides: dict[str, dict[str, int]] = {}

    def run(self, progress: Progress | None = None) -> None:
        """Verify every object and compare it with its row, then every row with its object.

        Parameters
        ----------
        progress : callable or None
            Called with the number of bytes read and their number.

        Raises
        ------
        StoreUnavailableError
            The remote tier cannot be used.
        """
        # Before the tier is listed: what is copied there meanwhile is not missing.
        before = self._index.ledger.remote_keys()
        sizes: dict[str, int] = {}
        for name, nbytes in self._remote.sizes().items():
            parsed = parse_name(name)
            if parsed is None:
                # It is not read: it may be anything, of any size.
                self._foreign(name)
                continue
            sizes[name] = nbytes
            if parsed[1] is not None:
                self._sides.setdefault(parsed[0], {})[parsed[1]] = nbytes
        done, total = 0, sum(sizes.values())
        for batch in _batches(sizes):
            for name, data in self._remote.get(batch).items():
                self._object(name, memoryview(data), sizes)
            done += sum(sizes[name] for name in batch)
            if progress is not None:
                progress(done, total)
        self._rows(before, sizes)

    def _object(self, name: str, data: memoryview, sizes: Mapping[str, int]) -> None:
        parsed = parse_name(name)
        if parsed is None:
            return
        key, side = parsed
        try:
            with as_file(data) as fd:
                if side is not None:
                    verify_sidecar(self._audit.codec, fd, key, side)
                    self._sidecar(key, side, len(data), sizes)
                    return
                header = verify_chunk(self._audit.codec, fd, key)
        except ChunkDamagedError as error:
            self._unusable(name, key, side, error)
            return
        row = ChunkRow.from_header(header, len(data))
        self._audit.report.remote_chunks += 1
        self._audit.report.remote_nbytes += len(data)
        if not self._index.present([key]):
            detail = "the object is undamaged but has no row"
            self._audit.found("orphaned", self._path(name), detail, "add the row", lambda: self._learn(row, header))

    def _foreign(self, name: str) -> None:
        detail, action = "its name is not one of a chunk's", "leave it: it may be somebody else's"
        self._audit.found("foreign", self._path(name), detail, action, lambda: True, left=True)

    def _learn(self, row: ChunkRow, header: ChunkHeader) -> bool:
        with self._index.transaction():
            if self._index.present([row.key]):
                return False
            self._index.add(row, header.content)
            place = Place(on_disk=False, on_remote=True)
            self._index.ledger.add(row.key, row.nbytes, float(header.num_tokens), 0.0, place)
            for side, nbytes in self._sides.get(row.key, {}).items():
                self._index.ledger.add_sidecar(row.key, side, nbytes)
        return True

    def _sidecar(self, key: str, side: str, nbytes: int, sizes: Mapping[str, int]) -> None:
        name = file_name(key, side)
        if file_name(key) not in sizes:
            detail = "its chunk is not on the remote tier"
            self._audit.found("orphaned", self._path(name), detail, "delete it", lambda: self._delete_side(key, name))
            return
        place, stored = self._index.ledger.place(key), self._index.ledger.sidecars(key).get(side)
        if place is not None and place.on_remote and not place.on_disk and stored != nbytes:

            def adopt() -> bool:
                with self._index.transaction():
                    return self._index.ledger.add_sidecar(key, side, nbytes)

            detail = "the sidecar has no row, or another size"
            self._audit.found("wrong row", self._path(name), detail, "write the row again", adopt)

    def _unusable(self, name: str, key: str, side: str | None, error: ChunkDamagedError) -> None:
        if isinstance(error, ChunkKeyError):
            action = "leave it for its key"
            self._audit.found("other key", self._path(name), error.reason, action, lambda: True, left=True)
            return
        self._damaged.add(name)
        place = self._index.ledger.place(key)
        on_disk = place is not None and place.on_disk
        action = "delete it; the disk has it, and it is copied again" if on_disk else "delete it; drop its row"

        def mend() -> bool:
            self._delete(name)
            with self._index.transaction():
                now = self._index.ledger.place(key)
                if now is None or not now.on_remote:
                    return True
                if now.on_disk:
                    self._index.ledger.move(key, Place(on_disk=True, on_remote=False))
                elif side is None:
                    self._index.remove([key], "damaged")
                else:
                    self._index.ledger.drop_sidecar(key, side)
            return True

        self._audit.found("damaged", self._path(name), error.reason, action, mend)

    def _rows(self, before: set[str], sizes: Mapping[str, int]) -> None:
        """Look for rows whose object is gone."""
        for key in sorted(before):
            name = file_name(key)
            if name not in sizes and name not in self._damaged:
                place = self._index.ledger.place(key)
                on_disk = place is not None and place.on_disk
                action = "note that only the disk has it" if on_disk else "drop the row"
                detail = "the row says that it is there"
                self._audit.found("missing", self._path(name), detail, action, lambda key=key: self._drop(key))  # type: ignore[misc]

    def _drop(self, key: str) -> bool:
        with self._index.transaction():
            place = self._index.ledger.place(key)
            if place is None or not place.on_remote:
                return False
            if place.on_disk:
                self._index.ledger.move(key, Place(on_disk=True, on_remote=False))
            else:
                self._index.remove([key], "damaged")
        return True

    def _delete_side(self, key: str, name: str) -> bool:
        # A machine that publishes a chunk copies its sidecars first: it may be there by now.
        if self._remote.get([file_name(key)], _PRESENT_NBYTES):
            return False
        return self._delete(name)

    def _delete(self, name: str) -> bool:
        self._remote.delete([name])
        return True

    def _path(self, name: str) -> str:
        return f"{self._remote.url.rstrip('/')}/{name}"


def _batches(sizes: Mapping[str, int]) -> Iterator[Sequence[str]]:
    """Yield names of objects that are read together; sidecars after the chunks."""
    batch, nbytes = list[str](), 0
    for name in sorted(sizes, key=lambda name: (name.count("."), name)):
        if batch and nbytes + sizes[name] > _READ_AT_ONCE_NBYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(name)
        nbytes += sizes[name]
    if batch:
        yield batch
