"""From the name of a file to its tensors: from memory if they are there, else from the disk."""

from __future__ import annotations

import os
import threading
from weakref import WeakValueDictionary

from fused_kv_llm.store.folder import StoreFolder, file_version
from fused_kv_llm.store.format import FileCodec, file_name
from fused_kv_llm.store.read.blocks import BlockReader, read_block
from fused_kv_llm.store.read.buffers import ReadBuffers
from fused_kv_llm.store.read.memory import MemoryTier, ResidentFile
from fused_kv_llm.store.read.open_file import KnownFile, OpenFile

__all__ = ["FileReader"]

_MOST_KNOWN = 4096
# Buffers of files that nobody uses any more, kept for the next ones; they come on top of the memory tier's budget.
_MOST_KEPT_NBYTES = 128 << 20


class FileReader:
    """Opens chunks and sidecars, and keeps in memory what was read completely; thread-safe.

    One rule says whether something is up to date: what was read of a file holds while the file's version (inode, size
    and times) is the same.

    Parameters
    ----------
    folder : StoreFolder
        Where the files are.
    memory : MemoryTier
        Keeps what was read completely.
    codec : FileCodec
        Decodes the files.

    Attributes
    ----------
    read_block : BlockReader
        Reads bytes of the files that are opened from now on.
    patience_s : float or None
        For how many seconds a thread waits for another one's read of such a file; None for as long as it takes.
    """

    def __init__(self, folder: StoreFolder, memory: MemoryTier, codec: FileCodec) -> None:
        self._folder = folder
        self._memory = memory
        self._codec = codec
        self.read_block: BlockReader = read_block
        self.patience_s: float | None = None
        self._buffers = ReadBuffers(_MOST_KEPT_NBYTES)
        self._lock = threading.Lock()
        # Files being read at the moment, so that a request joins a prefetch instead of reading again.
        self._open_files: WeakValueDictionary[str, OpenFile] = WeakValueDictionary()
        # Verified headers, the least recently used first.
        self._known: dict[str, KnownFile] = {}

    def find(
        self, key: str, name: str | None = None, *, whole: bool = False, keeps: bool = True
    ) -> ResidentFile | OpenFile | None:
        """Return a file that this process has verified before, if it has not changed since; the caller releases it.

        Whoever deletes or evicts a chunk deletes its file before its row, so such a file can be used without asking the
        index.

        Parameters
        ----------
        key : str
            The chunk.
        name : str or None
            The sidecar's; None is the chunk itself.
        whole : bool
            Whether all of a sidecar will be read, so that it is worth keeping.
        keeps : bool
            Whether it is kept in memory when it has been read completely, and counts as used there.

        Raises
        ------
        ChunkDamagedError, OSError
            As ``acquire``.
        """
        file = file_name(key, name)
        try:
            version = self._folder.version(key, name)
        except OSError:
            return None
        resident = self._memory.get(file, used=keeps)
        if resident is not None:
            if resident.version == version:
                return resident
            self._memory.discard(file)
        with self._lock:
            joined = self._open_files.get(file)
            if joined is not None and joined.version == version and joined.retain():
                joined.keeps = joined.keeps or keeps
                return joined
            known = self._known.get(file)
        return self._open(key, name, whole, keeps) if known is not None and known.version == version else None

    def acquire(
        self, key: str, name: str | None = None, *, whole: bool = False, keeps: bool = True
    ) -> ResidentFile | OpenFile:
        """Return a file from memory, from whoever is reading it, or from the disk; the caller releases it.

        Parameters
        ----------
        key, name, whole, keeps
            As ``find``.

        Raises
        ------
        ChunkDamagedError
            The file's header is damaged or foreign, or something else is in the file's place.
        OSError
            There is no such file (FileNotFoundError), or it cannot be opened.
        """
        return self.find(key, name, whole=whole, keeps=keeps) or self._open(key, name, whole, keeps)

    def _open(self, key: str, name: str | None, whole: bool, keeps: bool) -> OpenFile:
        fd = self._folder.open_file(key, name)
        try:
            known, is_new = self._identify(fd, key, name)
            # A chunk is kept when it is first read, a sidecar when it is read again: it is needed for a moment only,
            # and a request that reads it once should not hold all of it.
            fits = 0 < known.header.nbytes <= self._memory.budget_nbytes
            stream = name is not None and known.header.is_by_rows and not whole and (is_new or not fits)
            file = OpenFile(
                fd,
                known,
                self._buffers,
                self._done,
                stream=stream,
                keeps=keeps,
                read_block=self.read_block,
                patience_s=self.patience_s,
            )
        except BaseException:
            os.close(fd)
            raise
        return file if stream else self._register(file)

    def _register(self, file: OpenFile) -> OpenFile:
        """Let others join the reading of a file; join theirs if it has begun since ``find`` looked for it."""
        with self._lock:
            other = self._open_files.get(file.header.file_name)
            if other is None or other.version != file.version or not other.retain():
                self._open_files[file.header.file_name] = file
                return file
            other.keeps = other.keeps or file.keeps
        file.release()
        return other

    def forget(self, key: str, *names: str) -> None:
        """Serve a chunk and these sidecars to nobody from now on, whoever is reading them at the moment."""
        with self._lock:
            for file in (file_name(key), *(file_name(key, name) for name in names)):
                self._open_files.pop(file, None)
                self._known.pop(file, None)
                self._memory.discard(file)

    def forget_sidecar(self, key: str, name: str) -> None:
        """Serve a sidecar to nobody from now on; its chunk stays."""
        with self._lock:
            file = file_name(key, name)
            self._open_files.pop(file, None)
            self._known.pop(file, None)
            self._memory.discard(file)

    def forget_all(self) -> None:
        """Empty the memory tier; nothing that is being read at the moment gets into it."""
        with self._lock:
            self._open_files.clear()
            self._memory.clear()
        self._buffers.clear()

    def _identify(self, fd: int, key: str, name: str | None) -> tuple[KnownFile, bool]:
        """Return the version and header of an open file, and whether the header had to be read."""
        info = os.fstat(fd)
        file, version = file_name(key, name), file_version(info)
        with self._lock:
            before = self._known.pop(file, None)
        if before is not None and before.version == version:
            known, is_new = before, False
        else:
            known, is_new = KnownFile(version, self._codec.read_header(fd, key, name, info.st_size)), True
        with self._lock:
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[file] = known
        return known, is_new

    def _done(self, file: OpenFile) -> None:
        with self._lock:
            # A file that was forgotten meanwhile is not registered any more, and must not come back.
            if self._open_files.get(file.header.file_name) is file:
                del self._open_files[file.header.file_name]
                if file.is_complete and file.keeps:
                    self._memory.put(file.resident())
