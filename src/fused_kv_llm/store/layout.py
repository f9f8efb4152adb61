"""Where a store keeps its files, and every change that is made to them.

::

    kv_dir/index.sqlite                     see index.py
    kv_dir/chunks/ab/<key>.safetensors      see file_format.py; "ab" are the key's first two digits
    kv_dir/chunks/ab/<key>.<name>.safetensors   a side file, see sides.py
    kv_dir/tmp/<key>.<host>.<pid>.<random>  being written
    kv_dir/quarantine/                      damaged files, kept for inspection, never read

A chunk's file appears by ``rename`` after its bytes are on the disk and is never changed afterwards, so a
reader sees all of it or nothing. Whoever reads a file holds a shared ``flock`` on it, which ends with the process
at the latest; eviction passes over files that are held.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from fused_kv_llm.errors import StoreFullError, StoreUnavailableError
from fused_kv_llm.store.durable import lock_file, sync_folder, write_durably
from fused_kv_llm.store.names import check_key, check_name, parse_name

__all__ = ["Found", "StoreFolder"]

_TEMP_MAX_AGE_S = 3600.0
# What must lie in the folder itself: whoever plants a link has us delete, move or write what it leads to.
_OWN = ("chunks", "tmp", "quarantine", "index.sqlite", "index.sqlite-wal", "index.sqlite-shm")
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Neither follow a link out of the folder nor wait for the other end of a pipe.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class Found(NamedTuple):
    """A file below ``chunks``: whose it is by its name; no key means that the name is not one of ours."""

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

    Raises
    ------
    StoreUnavailableError
        The folder does not exist (``read_only``), cannot be created or cannot be written, or something in it, though
        not the folder itself, is a symbolic link.
    """

    def __init__(self, root: Path, *, read_only: bool) -> None:
        self.root = root
        self.index_path = root / "index.sqlite"
        self._chunks = os.path.join(root, "chunks")
        self._temp = os.path.join(root, "tmp")
        self._quarantine = os.path.join(root, "quarantine")
        self._host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]
        self._refuse_links()
        if read_only:
            if not self.index_path.is_file():
                raise StoreUnavailableError(
                    f"There is no chunk-KV store in {root} to open read-only. Check kv_dir, or open it "
                    "without read_only to create one."
                )
            return
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._chunks, self._temp, self._quarantine):
                os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreUnavailableError(
                f"The chunk-KV store in {root} cannot be created: {error}. Set kv_dir to a folder that you may write."
            ) from error
        for folder in (str(root), self._chunks, self._temp, self._quarantine):
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                raise StoreUnavailableError(
                    f"The folder {folder} cannot be written. Set kv_dir to a folder that you may write, "
                    "or open the store with read_only=True."
                )
        self.sweep_temp()

    def _refuse_links(self) -> None:
        for name in _OWN:
            _refuse_link(os.path.join(self.root, name))
        # A folder that cannot be listed is found out about below.
        with suppress(OSError):
            for shard in _entries(self._chunks):
                _refuse_link(shard.path)

    def chunk_path(self, key: str, name: str | None = None) -> str:
        """Return where the file of a chunk belongs, or its side file of that name."""
        check_key(key)
        suffix = "" if name is None else f".{check_name(name)}"
        return f"{self._chunks}/{key[:2]}/{key}{suffix}.safetensors"

    def has(self, key: str) -> bool:
        """Whether a chunk's file exists."""
        return os.path.lexists(self.chunk_path(key))

    def open_chunk(self, key: str, name: str | None = None) -> int:
        """Open a chunk's file, or a side file, for reading and hold it; return the descriptor.

        Raises
        ------
        FileNotFoundError
            There is none, or it is being evicted.
        OSError
            It cannot be opened.
        """
        fd = os.open(self.chunk_path(key, name), _READ_FLAGS)
        try:
            if not lock_file(fd, fcntl.LOCK_SH):
                raise FileNotFoundError(errno.ENOENT, "it is being evicted", self.chunk_path(key, name))
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
            # Whoever needs the file finds out what is wrong with it.
            yield
            return
        try:
            yield
        finally:
            os.close(fd)

    def walk(self) -> Iterator[Found]:
        """Yield every file below ``chunks``, in the order of their folders."""
        for shard in sorted(_entries(self._chunks), key=lambda entry: entry.name):
            if not shard.is_dir(follow_symlinks=False):
                yield Found(shard.path, None, None)
                continue
            for entry in _entries(shard.path):
                found = parse_name(entry.name)
                ours = found is not None and found[0][:2] == shard.name
                yield Found(entry.path, *found) if found and ours else Found(entry.path, None, None)

    @contextmanager
    def staged(self, key: str, parts: Sequence[memoryview]) -> Iterator[str]:
        """Bring a chunk's bytes to the disk, for ``publish`` to give them their place.

        Parameters
        ----------
        key : str
            The chunk.
        parts : sequence of memoryview
            The bytes of the file, in order.

        Yields
        ------
        str
            The temporary file, which is gone at the end, published or not.

        Raises
        ------
        StoreFullError
            The disk or the quota is full.
        StoreUnavailableError
            The file could not be written for another reason.
        """
        temp = os.path.join(self._temp, f"{key}.{self._host}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            with self._write_errors():
                write_durably(temp, parts)
            yield temp
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temp)

    def publish(self, staged: str, key: str, name: str | None = None) -> None:
        """Give a staged file its place, even if the power fails; raises as ``staged``."""
        path = self.chunk_path(key, name)
        shard = os.path.dirname(path)
        _refuse_link(shard)
        with self._write_errors():
            if not os.path.isdir(shard):
                os.makedirs(shard, mode=0o700, exist_ok=True)
                sync_folder(self._chunks)
            os.replace(staged, path)
            sync_folder(shard)

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFullError(
                    f"There is no room in {self.root} ({self.free_bytes() / 1e6:.1f} MB free): {error}. "
                    "Free space, or set kv_dir to another disk."
                ) from error
            raise StoreUnavailableError(
                f"A chunk KV could not be written to {self.root}: {error}. Check the disk and the "
                "folder's permissions, or set kv_dir to another folder."
            ) from error

    def remove(self, key: str, name: str | None = None) -> bool:
        """Delete a chunk's file, or a side file; returns whether there was one."""
        path = self.chunk_path(key, name)
        try:
            os.unlink(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreUnavailableError(f"{path} cannot be deleted: {error}. Check its permissions.") from error
        return True

    def evict(self, key: str) -> bool:
        """Delete a chunk's file unless somebody reads it, in any process; False if somebody does."""
        try:
            fd = os.open(self.chunk_path(key), _READ_FLAGS)
        except OSError:
            # Gone, or nothing that could be read: nobody holds it.
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
        """Move a chunk's file, or a side file, out of the way; returns where it went, None if there was none."""
        return self.quarantine_path(self.chunk_path(key, name))

    def quarantine_path(self, path: str) -> str | None:
        """Move a file of the store out of the way; returns where it went, None if there was none."""
        stem, dot, suffix = os.path.basename(path).partition(".")
        target = os.path.join(self._quarantine, f"{stem}.{secrets.token_hex(4)}{dot}{suffix}")
        try:
            if os.path.lexists(path):
                os.makedirs(self._quarantine, mode=0o700, exist_ok=True)
            os.replace(path, target)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailableError(
                f"The damaged file {path} cannot be moved to quarantine: {error}. Delete it by hand."
            ) from error
        return target

    def empty_quarantine(self) -> tuple[int, int]:
        """Delete what was moved to quarantine; returns how many files and bytes."""
        files = nbytes = 0
        for entry in _entries(self._quarantine):
            with suppress(FileNotFoundError):
                size = entry.stat(follow_symlinks=False).st_size
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
                files, nbytes = files + 1, nbytes + size
        return files, nbytes

    def free_bytes(self) -> int:
        """Return how many bytes the disk has left.

        Raises
        ------
        StoreUnavailableError
            The disk does not say.
        """
        try:
            return shutil.disk_usage(self.root).free
        except OSError as error:
            raise StoreUnavailableError(
                f"The disk of {self.root} cannot be asked for its free space: {error}. Check that it is still there."
            ) from error

    def abandoned(self) -> list[str]:
        """Return what writers that died left behind."""
        found = []
        for entry in _entries(self._temp):
            # Another process may finish or remove its file at any moment, and may belong to another user.
            with suppress(FileNotFoundError, PermissionError):
                if self._is_abandoned(entry):
                    found.append(entry.path)
        return found

    def sweep_temp(self) -> int:
        """Delete what writers that died left behind; returns how many files."""
        abandoned = self.abandoned()
        for path in abandoned:
            with suppress(FileNotFoundError, PermissionError):
                os.unlink(path)
        return len(abandoned)

    def _is_abandoned(self, entry: os.DirEntry[str]) -> bool:
        # No writer makes anything but files; a link is deleted without what it leads to.
        if not (entry.is_file(follow_symlinks=False) or entry.is_symlink()):
            return False
        if time.time() - entry.stat(follow_symlinks=False).st_mtime > _TEMP_MAX_AGE_S:
            return True
        parts = entry.name.split(".")
        # A pid means nothing on another machine that shares the folder.
        if len(parts) != 4 or parts[1] != self._host or not parts[2].isdecimal():
            return False
        try:
            os.kill(int(parts[2]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            return False
        return False


def _refuse_link(path: str) -> None:
    if os.path.islink(path):
        raise StoreUnavailableError(
            f"{path} is a symbolic link, and a store follows none out of its folder. Delete the link, and move what "
            "it leads to there if it is the store's; kv_dir itself may be a link."
        )


def _entries(path: str) -> list[os.DirEntry[str]]:
    """List a folder that somebody may have deleted under the open store: then there is nothing in it."""
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
