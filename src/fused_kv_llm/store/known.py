"""What this process knows of a chunk's file: its header, and which layers it has verified."""

from __future__ import annotations

import os
from collections.abc import Set

from fused_kv_llm.store.header import ChunkHeader

__all__ = ["FileVersion", "KnownFile", "file_version"]

FileVersion = tuple[int, int, int, int]
"""Inode, size, and times of the last change of the content and of anything, in nanoseconds."""

# A file that was changed shortly before it was verified may be changed again without getting another time.
_SETTLED_NS = 2_000_000_000


def file_version(info: os.stat_result) -> FileVersion:
    """Return what tells a file from whatever has stood, or will stand, in its place."""
    return info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns


class KnownFile:
    """A file whose header was verified; thread-safe.

    Parameters
    ----------
    version : tuple of int
        Of the file when its header was read.
    header : ChunkHeader
        The header.
    """

    __slots__ = ("_verified", "header", "version")

    def __init__(self, version: FileVersion, header: ChunkHeader) -> None:
        self.version = version
        self.header = header
        self._verified: frozenset[int] = frozenset()

    def is_verified(self, fd: int, layers: Set[int]) -> bool:
        """Whether these layers were verified and the file has not been touched since."""
        return layers <= self._verified and file_version(os.fstat(fd)) == self.version

    def note(self, layers: Set[int], opened_ns: int) -> None:
        """Remember that layers were verified.

        Parameters
        ----------
        layers : set of int
            The layers.
        opened_ns : int
            When the file was opened for that, by ``time.time_ns``; a file that was new then is verified again.
        """
        if layers <= self._verified:
            return
        if opened_ns - max(self.version[2:]) > _SETTLED_NS:
            # Two threads may overwrite each other's: then a layer is verified once more.
            self._verified |= layers
