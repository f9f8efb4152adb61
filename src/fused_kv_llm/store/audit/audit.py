"""The state of an audit: what it works on, and what it has found so far."""

from __future__ import annotations

from collections.abc import Callable

from fused_kv_llm.errors import ChunkDamagedError, ChunkKeyError
from fused_kv_llm.store.audit.findings import CheckReport, Finding
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.format import FileCodec
from fused_kv_llm.store.index import ChunkIndex

__all__ = ["Audit"]


class Audit:
    """An audit of a store, which other processes may go on using.

    Parameters
    ----------
    folder, index : StoreFolder, ChunkIndex
        The store's.
    codec : FileCodec
        Decodes the files.
    fix : bool
        Whether to mend.
    take_other_keys : bool
        Whether files that this key does not open go to quarantine, as damaged ones do.
    """

    def __init__(
        self, folder: StoreFolder, index: ChunkIndex, codec: FileCodec, *, fix: bool, take_other_keys: bool
    ) -> None:
        self.folder = folder
        self.index = index
        self.codec = codec
        self.fix = fix
        self.report = CheckReport(fixed=fix)
        self._take_other_keys = take_other_keys
        # Files that exist but cannot be used: they must not be reported as missing too.
        self._unusable: set[tuple[str, str | None]] = set()
        # Chunks with a finding, and whether they are on the disk once it is mended.
        self._fate: dict[str, bool] = {}

    def found(
        self, kind: str, path: str, detail: str, action: str, mend: Callable[[], bool], *, left: bool = False
    ) -> None:
        """Report a finding, and mend it if the audit mends.

        Parameters
        ----------
        kind, path, detail, action, left
            As ``Finding`` has them.
        mend : callable
            Mends it; returns False if another process has changed it meanwhile, so that nothing is wrong.
        """
        if not self.fix or mend():
            self.report.findings.append(Finding(kind, path, detail, action, left))

    def unusable(self, key: str, name: str | None, error: ChunkDamagedError | OSError) -> None:
        """Report the file of a chunk, or a sidecar, that cannot be read.

        Damaged files are moved to quarantine. A file whose header matches its checksum but cannot be decrypted is not
        damaged: it was written with another key, may be good, and is left where it is. So is a file that the system
        does not let us open, which says nothing about its content.
        """
        path = self.folder.chunk_path(key, name)
        self._unusable.add((key, name))
        if isinstance(error, OSError):
            detail = f"it cannot be opened now ({error})"
            self.found("unreadable", path, detail, "leave it: check its permissions", lambda: True, left=True)
            return
        if name is None:
            self._fate[key] = False
        is_key = isinstance(error, ChunkKeyError)
        left = is_key and not self._take_other_keys
        kind, rest = ("other key" if is_key else "damaged"), "drop its row"
        action = f"leave it for its key; {rest}" if left else f"move it to quarantine; {rest}"
        self.found(kind, path, error.reason, action, lambda: self._put_away(key, name, leave=left), left=left)

    def opened(self, key: str, name: str | None = None) -> int | None:
        """Open the file of a chunk, or a sidecar; None, and a finding, if it cannot be opened."""
        try:
            return self.folder.open_file(key, name)
        except FileNotFoundError:
            # It was evicted or deleted meanwhile.
            return None
        except (ChunkDamagedError, OSError) as error:
            self.unusable(key, name, error)
            return None

    def will_be(self, key: str, *, on_disk: bool) -> None:
        """Note where a chunk is once its finding is mended."""
        self._fate[key] = on_disk

    def is_unusable(self, key: str, name: str | None = None) -> bool:
        """Whether the file was reported already."""
        return (key, name) in self._unusable

    def is_on_disk(self, key: str) -> bool:
        """Whether a chunk is on the disk, as far as its row says, after mending."""
        if not self.fix and key in self._fate:
            return self._fate[key]
        place = self.index.ledger.place(key)
        return place is not None and place.on_disk

    def _put_away(self, key: str, name: str | None, *, leave: bool) -> bool:
        with self.index.transaction():
            if name is None:
                self.index.remove([key], "damaged")
            else:
                self.index.ledger.drop_sidecar(key, name)
            return leave or self.folder.quarantine(key, name) is not None
