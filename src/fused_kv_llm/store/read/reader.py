"""From a key to its chunk's KV: the memory tier first, then the file."""

from __future__ import annotations

import os
import stat
import threading
from weakref import WeakValueDictionary

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.folder import StoreFolder
from fused_kv_llm.store.format import Cipher, read_header
from fused_kv_llm.store.read.buffers import BufferPool
from fused_kv_llm.store.read.known import KnownFile, file_version
from fused_kv_llm.store.read.loader import ChunkLoader
from fused_kv_llm.store.read.memory import MemoryTier, ResidentChunk

__all__ = ["ChunkReader"]

_KNOWN_KEPT = 4096
# Buffers of chunks that are gone, kept for the next ones; they come on top of the memory tier's budget.
_MOST_KEPT_NBYTES = 128 << 20


class ChunkReader:
    """Finds chunks in the memory tier or on the disk and keeps what was read completely; thread-safe.

    Parameters
    ----------
    folder : StoreFolder
        Where the files are.
    memory : MemoryTier
        Where chunks that were read completely are kept.
    cipher : Cipher or None
        Decrypts the files.
    """

    def __init__(self, folder: StoreFolder, memory: MemoryTier, cipher: Cipher | None = None) -> None:
        self._folder = folder
        self._memory = memory
        self._cipher = cipher
        self._pool = BufferPool(_MOST_KEPT_NBYTES)
        self._lock = threading.Lock()
        # Chunks being read at the moment, so that a request joins a prefetch instead of reading again.
        self._loaders: WeakValueDictionary[str, ChunkLoader] = WeakValueDictionary()
        # Headers, valid as long as their files are not touched.
        self._known: dict[str, KnownFile] = {}

    def acquire(self, key: str) -> ResidentChunk | ChunkLoader:
        """Return the chunk from memory, from whoever is reading it, or from its file; the caller releases it.

        Raises
        ------
        ChunkDamagedError
            The file's header is damaged or foreign.
        OSError
            There is no such file (FileNotFoundError), or it cannot be opened.
        """
        resident = self._memory.get(key)
        if resident is not None:
            return resident
        with self._lock:
            joined = self._loaders.get(key)
            if joined is not None and joined.retain():
                return joined
        fd = self._folder.open_chunk(key)
        try:
            before = self._known.get(key)
            known = self._identify(fd, key)
            return self._loader(fd, known, is_begun=known is not before)
        except BaseException:
            os.close(fd)
            raise

    def acquire_known(self, key: str) -> ChunkLoader | None:
        """Return the chunk from its file if that is as it was when this process read it before; as ``acquire``.

        Whoever deletes or evicts a chunk takes its file away before its row. An audit with another key leaves a file
        that has lost its row, and what is in that is still right.
        """
        known = self._known.get(key)
        if known is None or key in self._memory or key in self._loaders:
            return None
        try:
            fd = self._folder.open_chunk(key)
        except OSError:
            # Whatever it is, ``acquire`` meets it again.
            return None
        try:
            if file_version(os.fstat(fd)) == known.version:
                return self._loader(fd, known, is_begun=False)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _loader(self, fd: int, known: KnownFile, *, is_begun: bool) -> ChunkLoader:
        budget_nbytes = self._memory.budget_nbytes
        keep = budget_nbytes > 0 and known.header.nbytes <= budget_nbytes
        loader = ChunkLoader(fd, known, self._pool, self._promote, self._unregister, keep=keep, is_begun=is_begun)
        with self._lock:
            self._loaders[known.header.key] = loader
        return loader

    def forget(self, key: str) -> None:
        """Serve the chunk to nobody from now on, whoever is reading it at the moment."""
        with self._lock:
            self._loaders.pop(key, None)
            self._known.pop(key, None)
            self._memory.discard(key)

    def forget_all(self) -> None:
        """Empty the memory tier; nothing that is being read at the moment gets into it."""
        with self._lock:
            self._loaders.clear()
            self._memory.clear()
        self._pool.clear()

    def _identify(self, fd: int, key: str) -> KnownFile:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ChunkDamagedError(key, "it is not a regular file")
        version = file_version(info)
        known = self._known.get(key)
        if known is not None and known.version == version:
            return known
        known = KnownFile(version, read_header(fd, key, info.st_size, self._cipher))
        with self._lock:
            if len(self._known) >= _KNOWN_KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = known
        return known

    def _promote(self, loader: ChunkLoader) -> None:
        with self._lock:
            if self._is_registered(loader):
                del self._loaders[loader.header.key]
                self._memory.put(loader.resident())

    def _unregister(self, loader: ChunkLoader) -> None:
        with self._lock:
            if self._is_registered(loader):
                del self._loaders[loader.header.key]

    def _is_registered(self, loader: ChunkLoader) -> bool:
        # Not any more if the chunk was forgotten meanwhile; then it must not come back.
        return self._loaders.get(loader.header.key) is loader
