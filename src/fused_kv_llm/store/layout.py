"""Where a store keeps its files, and every change that is made to them.

::

    kv_dir/index.sqlite                     see index.py
    kv_dir/chunks/ab/<key>.safetensors      see file_format.py; "ab" are the key's first two digits
    kv_dir/tmp/<key>.<host>.<pid>.<random>  being written
    kv_dir/quarantine/                      damaged files, kept for inspection, never read

A chunk's file appears by ``rename`` after its bytes are on the disk and is never changed afterwards, so a
reader sees all of it or nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fused_kv_llm.errors import ConfigError, StoreFullError, StoreUnavailableError

__all__ = ["StoreFolder", "check_key"]

_KEY = re.compile(r"[0-9a-f]{64}")
_TEMP_MAX_AGE_S = 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Neither follow a link out of the folder nor wait for the other end of a pipe.
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def check_key(key: str) -> str:
    """Return ``key`` if it can be a chunk's key, so that no other string ever becomes part of a path.

    Raises
    ------
    ConfigError
        It is not 64 lower-case hexadecimal digits.
    """
    if not isinstance(key, str) or _KEY.fullmatch(key) is None:
        raise ConfigError(f"A chunk's key is 64 hexadecimal digits, as chunk_key() returns it, not {key!r}.")
    return key


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
        The folder does not exist (``read_only``), cannot be created or cannot be written.
    """

    def __init__(self, root: Path, *, read_only: bool) -> None:
        self.root = root
        self.index_path = root / "index.sqlite"
        self._chunks = os.path.join(root, "chunks")
        self._temp = os.path.join(root, "tmp")
        self._quarantine = os.path.join(root, "quarantine")
        self._host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]
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
        self._sweep_temp()

    def chunk_path(self, key: str) -> str:
        """Return where the file of a chunk belongs."""
        check_key(key)
        return f"{self._chunks}/{key[:2]}/{key}.safetensors"

    def has(self, key: str) -> bool:
        """Whether a chunk's file exists."""
        return os.path.lexists(self.chunk_path(key))

    def open_chunk(self, key: str) -> int:
        """Open a chunk's file for reading and return its descriptor; raises OSError."""
        return os.open(self.chunk_path(key), _READ_FLAGS)

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
                _write_durably(temp, parts)
            yield temp
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temp)

    def publish(self, staged: str, key: str) -> None:
        """Give a staged file its place, even if the power fails; raises as ``staged``."""
        path = self.chunk_path(key)
        shard = os.path.dirname(path)
        with self._write_errors():
            if not os.path.isdir(shard):
                os.makedirs(shard, mode=0o700, exist_ok=True)
                _sync_folder(self._chunks)
            os.replace(staged, path)
            _sync_folder(shard)

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

    def remove(self, key: str) -> bool:
        """Delete a chunk's file; returns whether there was one."""
        try:
            os.unlink(self.chunk_path(key))
        except FileNotFoundError:
            return False
        except OSError as error:
            raise StoreUnavailableError(
                f"{self.chunk_path(key)} cannot be deleted: {error}. Check its permissions."
            ) from error
        return True

    def quarantine(self, key: str) -> str | None:
        """Move a chunk's file out of the way; returns where it went, None if there was none."""
        target = os.path.join(self._quarantine, f"{key}.{secrets.token_hex(4)}.safetensors")
        try:
            os.replace(self.chunk_path(key), target)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailableError(
                f"The damaged file {self.chunk_path(key)} cannot be moved to quarantine: {error}. Delete it by hand."
            ) from error
        return target

    def free_bytes(self) -> int:
        """Return how many bytes the disk has left."""
        return shutil.disk_usage(self.root).free

    def _sweep_temp(self) -> None:
        for entry in os.scandir(self._temp):
            # Another process may finish or remove its file at any moment, and may belong to another user.
            with suppress(FileNotFoundError, PermissionError):
                if self._is_abandoned(entry):
                    os.unlink(entry.path)

    def _is_abandoned(self, entry: os.DirEntry[str]) -> bool:
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


def _write_durably(path: str, parts: Sequence[memoryview]) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for part in parts:
            rest = part
            while rest:
                rest = rest[os.write(fd, rest) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_folder(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
