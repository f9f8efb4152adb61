"""From a key to its chunk's KV: the memory tier first, then the file."""

from __future__ import annotations

import os
import stat
import threading
from weakref import WeakValueDictionary

from fused_kv_llm.errors import ChunkDamagedError
from fused_kv_llm.store.buffers import BufferPool
from fused_kv_llm.store.cipher import Cipher
from fused_kv_llm.store.header import ChunkHeader, read_header
from fused_kv_llm.store.layout import StoreFolder
from fused_kv_llm.store.loader import ChunkLoader
from fused_kv_llm.store.memory import MemoryTier, ResidentChunk

__all__ = ["ChunkReader"]

_HEADERS_KEPT = 4096
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
        # Verified headers, valid as long as the file's inode, size and modification time stay the same.
        self._headers: dict[str, tuple[tuple[int, int, int], ChunkHeader]] = {}

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
            header = self._header(fd, key)
            loader = ChunkLoader(fd, header, self._pool, self._promote, self._unregister)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            self._loaders[key] = loader
        return loader

    def forget(self, key: str) -> None:
        """Serve the chunk to nobody from now on, whoever is reading it at the moment."""
        with self._lock:
            self._loaders.pop(key, None)
            self._headers.pop(key, None)
            self._memory.discard(key)

    def forget_all(self) -> None:
        """Empty the memory tier; nothing that is being read at the moment gets into it."""
        with self._lock:
            self._loaders.clear()
            self._memory.clear()
        self._pool.clear()

    def _header(self, fd: int, key: str) -> ChunkHeader:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise ChunkDamagedError(key, "it is not a regular file")
        version = (info.st_ino, info.st_mtime_ns, info.st_size)
        cached = self._headers.get(key)
        if cached is not None and cached[0] == version:
            return cached[1]
        header = read_header(fd, key, info.st_size, self._cipher)
        with self._lock:
            if len(self._headers) >= _HEADERS_KEPT:
                del self._headers[next(iter(self._headers))]
            self._headers[key] = version, header
        return header

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
