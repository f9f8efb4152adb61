"""Files that are being written: ``kv_dir/tmp``, and what dead writers left in it."""

from __future__ import annotations

import hashlib
import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store.folder.disk import write_errors
from fused_kv_llm.store.folder.durable import write_durably
from fused_kv_llm.store.folder.no_follow import open_beneath

__all__ = ["STAGING", "Staging"]

STAGING = "tmp"
_MAX_AGE_S = 3600.0


class Staging:
    """The folder of a store's temporary files, ``<key>.<host>.<pid>.<random>``.

    Parameters
    ----------
    root : Path
        ``kv_dir``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._host = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:12]

    @contextmanager
    def staged(self, key: str, parts: Sequence[memoryview]) -> Iterator[str]:
        """Write a file's bytes to the disk, so that ``StoreFolder.publish`` can move them to their place.

        Parameters
        ----------
        key : str
            The chunk.
        parts : sequence of memoryview
            The bytes of the file, in order.

        Yields
        ------
        str
            The temporary file's name. The file is gone at the end, published or not.

        Raises
        ------
        StoreFullError
            The disk or the quota is full.
        StoreUnavailableError
            The file could not be written for another reason.
        """
        name = f"{key}.{self._host}.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            with write_errors(self._root), open_beneath(self._root, STAGING, make=True) as folder:
                write_durably(folder, name, parts)
            yield name
        finally:
            # ``sweep`` deletes later what cannot be deleted now.
            with suppress(StoreUnavailableError):
                self.delete(name)

    def delete(self, name: str) -> bool:
        """Delete a temporary file; returns whether there was one.

        Raises
        ------
        StoreUnavailableError
            It cannot be deleted.
        """
        try:
            with open_beneath(self._root, STAGING) as folder:
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        except OSError as error:
            path = self._root / STAGING / name
            raise StoreUnavailableError(f"{path} cannot be deleted: {error}. Check its permissions.") from error
        return True

    def abandoned(self) -> list[str]:
        """Return the names of what dead writers left behind."""
        found = []
        # The folder may have been deleted while the store is open: then there is nothing in it.
        with suppress(FileNotFoundError), open_beneath(self._root, STAGING) as folder, os.scandir(folder) as entries:
            for entry in entries:
                # Another process may finish or delete its file at any moment, and may belong to another user.
                with suppress(FileNotFoundError, PermissionError):
                    if self._is_abandoned(entry):
                        found.append(entry.name)
        return found

    def sweep(self) -> int:
        """Delete what dead writers left behind; returns how many files."""
        swept = 0
        for name in self.abandoned():
            # Files of other users stay where they are.
            with suppress(StoreUnavailableError):
                swept += self.delete(name)
        return swept

    def _is_abandoned(self, entry: os.DirEntry[str]) -> bool:
        # Writers make only files. A link is deleted, what it leads to is not.
        if not (entry.is_file(follow_symlinks=False) or entry.is_symlink()):
            return False
        if time.time() - entry.stat(follow_symlinks=False).st_mtime > _MAX_AGE_S:
            return True
        parts = entry.name.split(".")
        # The pid says nothing if the file is another machine's that shares the folder.
        if len(parts) != 4 or parts[1] != self._host or not parts[2].isdecimal():
            return False
        try:
            os.kill(int(parts[2]), 0)
        except (ProcessLookupError, OverflowError):
            return True
        except PermissionError:
            return False
        return False
