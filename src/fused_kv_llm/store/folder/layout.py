"""Where a store keeps its files, and every change that is made to them.

::

    kv_dir/index.sqlite                         see ``index``
    kv_dir/chunks/ab/<key>.safetensors          see ``format``; "ab" are the key's first two digits
    kv_dir/chunks/ab/<key>.<name>.safetensors   a sidecar
    kv_dir/tmp/                                 see staging.py
    kv_dir/quarantine/                          see quarantine.py

A chunk's file appears by ``rename`` after its bytes are on the disk and never changes afterwards, so a reader sees all
of it or nothing. A reader holds a shared ``flock`` on the file, which ends with the process at the latest; eviction
skips files that are held.

Every write, move and deletion goes through ``open_beneath``, so that no link leads the store out of its folder, not
even a link that replaces a folder while the store is open.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fused_kv_llm.errors import ChunkDamagedError, StoreUnavailableError
from fused_kv_llm.store.folder.disk import write_errors
from fused_kv_llm.store.folder.durable import lock_file
from fused_kv_llm.store.folder.file_version import FileVersion, file_version
from fused_kv_llm.store.folder.no_follow import open_beneath
from fused_kv_llm.store.folder.prepare import CHUNKS, INDEX, prepare_folder
from fused_kv_llm.store.folder.quarantine import Quarantine
from fused_kv_llm.store.folder.staging import STAGING, Staging
from fused_kv_llm.store.format import file_name, parse_name

__all__ = ["Found", "StoreFolder"]

# Neither follow a link out of the folder nor wait for the other end of a pipe.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
# A folder on the path to a file. With O_PATH, Linux does not ask for the permission to list it.
_PATH_FLAGS = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW


class Found(NamedTuple):
    """Something below ``chunks``, with the key and sidecar name that its name says; no key if it is not a store's."""

    path: str
    key: str | None
    name: str | None


class StoreFolder:
    """The folder of a store.

    Parameters
    ----------
    root : Path
        ``kv_dir``. Created, with its subfolders, unless ``read_only``.
    read_only : bool
        Change nothing in the folder.

    Attributes
    ----------
    index_path : Path
        Where the index is.
    staging : Staging
        Files that are being written.
    kept : Quarantine
        Damaged files that were taken out.

    Raises
    ------
    StoreUnavailableError
        The folder does not exist (``read_only``), cannot be created or cannot be written, or something in it, though
        not the folder itself, is a symbolic link.
    """

    def __init__(self, root: Path, *, read_only: bool) -> None:
        self.root = root
        self.index_path = root / INDEX
        self.staging = Staging(root)
        self.kept = Quarantine(root)
        self._chunks = os.path.join(root, CHUNKS)
        prepare_folder(root, read_only=read_only)
        if not read_only:
            self.staging.sweep()

    def chunk_path(self, key: str, name: str | None = None) -> str:
        """Return where the file of a chunk belongs, or its sidecar of that name."""
        return f"{self._chunks}/{key[:2]}/{file_name(key, name)}"

    def has(self, key: str, name: str | None = None) -> bool:
        """Whether a chunk's file, or a sidecar, exists and is a file.

        Raises
        ------
        StoreUnavailableError
            That cannot be found out.
        """
        file = file_name(key, name)
        try:
            # What a link in place of the folder leads to is not the store's.
            with suppress(FileNotFoundError, NotADirectoryError), _opened_folder(f"{self._chunks}/{key[:2]}") as shard:
                return stat.S_ISREG(os.stat(file, dir_fd=shard, follow_symlinks=False).st_mode)
        except OSError as error:
            raise StoreUnavailableError(
                f"{self.chunk_path(key, name)} cannot be looked at: {error}. Check its permissions."
            ) from error
        return False

    def version(self, key: str, name: str | None = None) -> FileVersion:
        """Return the version of a chunk's file, or of a sidecar.

        Raises
        ------
        OSError
            There is none (FileNotFoundError), or it cannot be looked at.
        """
        return file_version(os.stat(self.chunk_path(key, name), follow_symlinks=False))

    def open_chunk(self, key: str, name: str | None = None) -> int:
        """Open whatever is in the place of a chunk's file, or of a sidecar, for reading, and hold it.

        Returns
        -------
        int
            The descriptor. It need not be a regular file's.

        Raises
        ------
        FileNotFoundError
            There is none, or it is being evicted.
        OSError
            It cannot be opened; ``NotADirectoryError`` where its folder was replaced by a link.
        """
        # In two steps and not by `open_beneath`: opening is most of the cost of reading a small chunk.
        file = file_name(key, name)
        shard = os.open(f"{self._chunks}/{key[:2]}", _PATH_FLAGS)
        try:
            fd = os.open(file, _READ_FLAGS, dir_fd=shard)
        finally:
            os.close(shard)
        try:
            if not lock_file(fd, fcntl.LOCK_SH):
                raise FileNotFoundError(errno.ENOENT, "it is being evicted", self.chunk_path(key, name))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def open_file(self, key: str, name: str | None = None) -> int:
        """Open a chunk's file, or a sidecar, as ``open_chunk`` does.

        Raises
        ------
        ChunkDamagedError
            Something else is in its place: a link, a folder, a pipe, ...
        FileNotFoundError, OSError
            As ``open_chunk``.
        """
        try:
            fd = self.open_chunk(key, name)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENXIO):
                raise ChunkDamagedError(key, "it is not a regular file") from error
            raise
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ChunkDamagedError(key, "it is not a regular file")
        except BaseException:
            os.close(fd)
            raise
        return fd

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Keep a chunk's file, if there is one, from being evicted."""
        try:
            fd = self.open_chunk(key)
        except OSError:
            # The next reader finds out what is wrong with the file.
            yield
            return
        try:
            yield
        finally:
            os.close(fd)

    def walk(self) -> Iterator[Found]:
        """Yield everything below ``chunks`` that should be a file, in the order of their folders."""
        for shard, is_folder in sorted(self._entries()):
            path = os.path.join(self._chunks, shard)
            if not is_folder:
                yield Found(path, None, None)
                continue
            for name, _ in self._entries(shard):
                found = parse_name(name)
                ours = found is not None and found[0][:2] == shard
                yield Found(os.path.join(path, name), *(found if found and ours else (None, None)))

    def _entries(self, *shard: str) -> list[tuple[str, bool]]:
        """List names, and whether they are folders; empty if the folder was deleted while the store is open."""
        with suppress(FileNotFoundError), self._open_folder(*shard) as folder, os.scandir(folder) as entries:
            return [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        return []

    def publish(self, staged: str, key: str, name: str | None = None) -> None:
        """Give a staged file its place, even if the power fails; raises as ``Staging.staged``."""
        file = file_name(key, name)
        with (
            write_errors(self.root),
            open_beneath(self.root, STAGING) as temp,
            self._open_folder(key[:2], make=True) as shard,
        ):
            try:
                os.replace(staged, file, src_dir_fd=temp, dst_dir_fd=shard)
            except IsADirectoryError:
                # A folder that no writer has made is in its place.
                self.kept.take(shard, file)
                os.replace(staged, file, src_dir_fd=temp, dst_dir_fd=shard)
            os.fsync(shard)

    def remove(self, key: str, name: str | None = None) -> bool:
        """Delete a chunk's file, or a sidecar; returns whether there was one.

        A folder in its place is moved to quarantine, since its content is not the store's.
        """
        file = file_name(key, name)
        try:
            with self._open_folder(key[:2]) as shard:
                if stat.S_ISDIR(os.stat(file, dir_fd=shard, follow_symlinks=False).st_mode):
                    return self.kept.take(shard, file) is not None
                os.unlink(file, dir_fd=shard)
        except FileNotFoundError:
            return False
        except OSError as error:
            path = self.chunk_path(key, name)
            raise StoreUnavailableError(f"{path} cannot be deleted: {error}. Check its permissions.") from error
        return True

    def evict(self, key: str) -> bool:
        """Delete a chunk's file unless a process is reading it; False if one is."""
        file = file_name(key)
        try:
            with self._open_folder(key[:2]) as shard:
                fd = os.open(file, _READ_FLAGS, dir_fd=shard)
        except OSError:
            # Gone, or not readable: nobody holds it.
            self.remove(key)
            return True
        try:
            if not lock_file(fd, fcntl.LOCK_EX):
                return False
            self.remove(key)
        finally:
            os.close(fd)
        return True

    def quarantine(self, key: str, name: str | None = None) -> str | None:
        """Move whatever is in the place of a chunk's file, or of a sidecar, to quarantine.

        Returns
        -------
        str or None
            Where it went; None if there was nothing.

        Raises
        ------
        StoreUnavailableError
            It cannot be moved.
        """
        return self.quarantine_path(self.chunk_path(key, name))

    def quarantine_path(self, path: str) -> str | None:
        """Move something that ``walk`` found to quarantine; returns and raises as ``quarantine``."""
        *folders, name = os.path.relpath(path, self._chunks).split(os.sep)
        try:
            with self._open_folder(*folders) as folder:
                return self.kept.take(folder, name)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailableError(
                f"The damaged file {path} cannot be moved to quarantine: {error}. Delete it by hand."
            ) from error

    def _open_folder(self, *shard: str, make: bool = False) -> AbstractContextManager[int]:
        return open_beneath(self.root, CHUNKS, *shard, make=make)


@contextmanager
def _opened_folder(path: str) -> Iterator[int]:
    fd = os.open(path, _PATH_FLAGS)
    try:
        yield fd
    finally:
        os.close(fd)
