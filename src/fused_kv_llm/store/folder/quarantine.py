"""Files that were taken out of a store: ``kv_dir/quarantine``, kept for inspection and never read."""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path

from fused_kv_llm.errors import StoreUnavailableError
from fused_kv_llm.store.folder.no_follow import open_beneath

__all__ = ["QUARANTINE", "Quarantine"]

QUARANTINE = "quarantine"
# File systems allow 255 bytes, and something is added to the name.
_LONGEST_NAME = 240


class Quarantine:
    """The folder of a store's damaged files.

    Parameters
    ----------
    root : Path
        ``kv_dir``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def take(self, folder: int, name: str) -> str | None:
        """Move anything out of an open folder; returns where it is now, None if there was nothing.

        Raises
        ------
        OSError
            It cannot be moved.
        """
        kept = os.fsdecode(os.fsencode(name)[-_LONGEST_NAME:])
        stem, dot, suffix = kept.partition(".")
        target = f"{stem}.{secrets.token_hex(4)}{dot}{suffix}"
        try:
            with open_beneath(self._root, QUARANTINE, make=True) as quarantine:
                os.replace(name, target, src_dir_fd=folder, dst_dir_fd=quarantine)
        except FileNotFoundError:
            return None
        return os.path.join(self._root, QUARANTINE, target)

    def empty(self) -> tuple[int, int]:
        """Delete everything in quarantine; returns how many files and bytes.

        Raises
        ------
        StoreUnavailableError
            Something cannot be deleted; everything else was.
        """
        files = nbytes = 0
        failed: list[OSError] = []
        with suppress(FileNotFoundError), open_beneath(self._root, QUARANTINE) as folder:
            with os.scandir(folder) as entries:
                found = list(entries)
            for entry in found:
                try:
                    size = entry.stat(follow_symlinks=False).st_size
                    _delete(folder, entry)
                except FileNotFoundError:
                    # Another process has deleted it.
                    continue
                except OSError as error:
                    failed.append(error)
                    continue
                files, nbytes = files + 1, nbytes + size
        if failed:
            raise StoreUnavailableError(
                f"{len(failed)} files in {self._root / QUARANTINE} cannot be deleted: {failed[0]}. Delete them by hand."
            ) from failed[0]
        return files, nbytes


def _delete(folder: int, entry: os.DirEntry[str]) -> None:
    if entry.is_dir(follow_symlinks=False):
        shutil.rmtree(entry.name, dir_fd=folder)
    else:
        os.unlink(entry.name, dir_fd=folder)
